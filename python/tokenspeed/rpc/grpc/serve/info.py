# SPDX-License-Identifier: MIT
"""What the service tells of an engine: its model, its flags and limits, its load. Reads only; any thread."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf import struct_pb2, timestamp_pb2

from tokenspeed.engine.messages import LoadNumbers
from tokenspeed.engine.offline import Engine
from tokenspeed.rpc.grpc.serve.meter import LoadMeter
from tokenspeed.version import __version__
from tokenspeed_protos import common_pb2
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb

_SECRETS = ("rl_control_api_key", "api_key", "zmq_curve_secret_key_file")


class EngineInfo:
    """meters: one a replica."""

    def __init__(self, engine: Engine, meters: Sequence[LoadMeter], reasoning_parser: str | None) -> None:
        self._reasoning_parser = reasoning_parser
        self._engine = engine
        self._meters = meters
        self._started_s = time.time()

    @property
    def served_name(self) -> str:
        return str(self._engine.flags["served_model_name"] or self._engine.source.name)

    @property
    def capacity_tokens(self) -> int:
        """Of each replica."""
        return self._engine.num_blocks * self._engine.config.memory.block_size

    def model(self) -> pb.GetModelInfoResponse:
        engine = self._engine
        shape, limits = engine.model_config, engine.config.scheduler
        return pb.GetModelInfoResponse(
            model_path=engine.operations.model_path,
            tokenizer_path=str(engine.tokenizer_path),
            served_model_name=self.served_name,
            model_type=shape.model_type,
            architectures=[shape.architecture],
            max_context_length=limits.max_model_len,
            max_req_input_len=limits.max_model_len - 1,
            vocab_size=shape.vocab_size,
            eos_token_ids=shape.eos_token_ids,
            bos_token_id=shape.bos_token_id or 0,
            weight_version=engine.operations.weight_version,
            default_sampling_params_json=json.dumps(self.sampling_defaults) if self.sampling_defaults else "",
            model_dtype=engine.config.device.dtype,
        )

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What the model's authors recommend where a request says nothing."""
        return {} if self._engine.tokenizer is None else self._engine.tokenizer.facts.sampling_defaults

    def server(self, active_requests: int) -> pb.GetServerInfoResponse:
        engine, limits = self._engine, self._engine.config.scheduler
        args: dict[str, Any] = {name: _plain(value) for name, value in engine.flags.items() if name not in _SECRETS}
        args |= {
            "model": str(engine.source.path),
            "served_model_name": self.served_name,
            "weight_version": engine.operations.weight_version,
            # Whoever knows of ranks divides by their number.
            "max_num_seqs": limits.max_num_seqs * engine.num_replicas,
            "dp_size": engine.num_replicas,
            "max_model_len": limits.max_model_len,
            "max_total_tokens": self.capacity_tokens,
            "chunked_prefill_size": limits.max_batched_tokens,
            "page_size": limits.block_size,
            "kv_cache_dtype": engine.config.kv_cache.dtype,
            # A grammar holds from the first token on; whoever wants reasoning before it says where it ends.
            "constrained_decoding_start": "first_token",
        }
        if self._reasoning_parser is not None:
            args["engine_reasoning_parser"] = self._reasoning_parser
        port = engine.ports.control_port
        if port is not None:
            args["rl.control_url"] = f"http://{engine.config.operations.control_host}:{port}"
        facts = {
            "max_total_num_tokens": self.capacity_tokens,
            "max_req_input_len": limits.max_model_len - 1,
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "shm_namespace_id": _shm_namespace(),
        }
        return pb.GetServerInfoResponse(
            server_args=_struct(args),
            scheduler_info=_struct(facts),
            active_requests=active_requests,
            is_paused=engine.operations.is_paused,
            uptime_seconds=time.time() - self._started_s,
            max_total_num_tokens=self.capacity_tokens,
            tokenspeed_version=__version__,
            start_time=timestamp_pb2.Timestamp(seconds=int(self._started_s)),
            constrained_decoding="requested" if engine.config.admission.grammar_backend != "none" else "",
        )

    def loads(self, rank: int | None) -> pb.GetLoadsResponse:
        """By data-parallel rank, or of one; of one that is gone, or never was, there is nothing to tell."""
        loads = [self._scheduler_load(found) for found in self.serving_ranks() if rank in (None, found)]
        count = max(1, len(loads))
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=__version__,
            dp_rank_count=self._engine.num_replicas,
            loads=loads,
            aggregate=pb.AggregateMetrics(
                total_running_reqs=sum(load.num_running_reqs for load in loads),
                total_waiting_reqs=sum(load.num_waiting_reqs for load in loads),
                total_reqs=sum(load.num_total_reqs for load in loads),
                avg_token_usage=sum(load.token_usage for load in loads) / count,
                avg_throughput=sum(load.gen_throughput for load in loads) / count,
                avg_utilization=sum(load.utilization for load in loads) / count,
            ),
        )

    def serving_ranks(self) -> list[int]:
        """The data-parallel ranks that are left."""
        return [rank for rank, load in enumerate(self._engine.loads()) if load is not None]

    def _scheduler_load(self, rank: int) -> pb.SchedulerLoad:
        load, limits, meter = self._engine.loads()[rank], self._engine.config.scheduler, self._meters[rank]
        load = load or LoadNumbers(0, 0, 0, 1)  # it died just now
        usage = load.active_blocks / load.total_blocks
        return pb.SchedulerLoad(
            dp_rank=rank,
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=load.active_blocks * limits.block_size,
            max_total_num_tokens=self.capacity_tokens,
            max_running_requests=limits.max_num_seqs,
            token_usage=usage,
            active_token_usage=usage,
            gen_throughput=meter.tokens_per_s(),
            cache_hit_rate=meter.cache_hit_rate,
            utilization=load.num_running / limits.max_num_seqs,
        )

    def load_record(self, rank: int, sample: int) -> common_pb2.EngineLoad:
        """The same for the stream of KV events, in a batch that has nothing else."""
        load = self._scheduler_load(rank)
        return common_pb2.EngineLoad(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            token_usage=load.token_usage,
            active_token_usage=load.active_token_usage,
            gen_throughput=load.gen_throughput,
            max_running_requests=load.max_running_requests,
            sample=sample,
            load_only=True,
            cache_hit_rate=load.cache_hit_rate,
            num_used_tokens=load.num_used_tokens,
            max_total_num_tokens=load.max_total_num_tokens,
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(values)
    return struct


def _shm_namespace() -> str:
    """Equal for two processes that see the same /dev/shm."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}:{os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""
