# SPDX-License-Identifier: MIT
"""An engine process that serves a gateway over the lane: build, register, run, say goodbye.

Runs on the main thread, so that SIGTERM and SIGINT can end the loop; whatever ends it, the gateway is told
(ENGINE_CORE_DEAD) and the exit status says why: 0 asked to stop, 1 an engine fault, 2 a flag or a model.
"""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType
from typing import Any

import msgspec

from tokenspeed.config.hardware import Hardware
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.resolve import Config
from tokenspeed.engine.core import EngineCore, set_frontend, start
from tokenspeed.engine.lane_frontend import LaneFrontend
from tokenspeed.engine.leader import Leader
from tokenspeed.engine.processes import end_now
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.engine_end import EngineLane, LaneTimeout
from tokenspeed.version import __version__

logger = logging.getLogger("tokenspeed.engine")

_CONNECT_TIMEOUT_S = 600.0
_CONNECT_ATTEMPT_S = 5.0


class StopSignal:
    """Set by SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True


def run_headless(
    config: Config, source: ModelSource, model_config: ModelConfig, hardware: Hardware, served_name: str
) -> int:
    """Serve until a signal. Returns the exit status; raises what `build` raises."""
    started_s = time.monotonic()
    stop = StopSignal()
    core = start(config, source, model_config, hardware, progress=lambda stage: logger.info("%s ...", stage))
    logger.info(
        "engine is warm after %.1f s: %s, %d KV blocks of %d tokens",
        time.monotonic() - started_s,
        config.device.device,
        core.num_blocks,
        config.memory.block_size,
    )
    address = f"tcp://{config.lane.host}:{config.lane.port}"
    lane = EngineLane(
        address,
        config.lane.engine_index,
        ready_response(core, served_name),
        config.parallel.data_size,
        config.lane.curve,
    )
    if isinstance(core.ranks, Leader):
        core.ranks.on_loss = end_now
    try:
        if not _connect(lane, stop):
            return 0 if stop.is_set else 1
        logger.info("connected to the gateway at %s", address)
        set_frontend(core, LaneFrontend(lane))
        core.loop.run(lambda: stop.is_set)
        return 0
    except Exception as error:
        logger.exception("the engine's loop died")
        cause = core.ranks.cause(error)
        if cause is not error:
            logger.error("the engine ends: %s", cause)
        return 1
    finally:
        lane.close()
        core.close()


def ready_response(core: EngineCore, served_name: str) -> wire.ReadyResponse:
    """What the engine tells the gateway about itself."""
    limits, parallel = core.config.scheduler, core.config.parallel
    num_tokens = (core.num_blocks - 1) * limits.block_size
    return wire.ReadyResponse(
        max_model_len=limits.max_model_len,
        num_gpu_blocks=core.num_blocks - 1,
        block_size=limits.block_size,
        dtype=core.config.device.dtype,
        vllm_version=f"tokenspeed-{__version__}",
        world_size=parallel.tensor_size * parallel.data_size,
        data_parallel_size=parallel.data_size,
        tensor_parallel_size=parallel.tensor_size,
        pipeline_parallel_size=1,
        data_parallel_rank=parallel.data_rank or 0,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_batched_tokens,
        instance_id=served_name,
        kv_cache_size_tokens=num_tokens,
        kv_cache_max_concurrency=num_tokens / limits.max_model_len,
        kv_events_config=_kv_events(core),
        positional_layouts=wire.default_layouts(),
        abort_reasons=[wire.REASON_STOP.decode()],
    )


def _kv_events(core: EngineCore) -> dict[str, Any] | None:
    """What a gateway may want to subscribe to; None when nothing is published."""
    config = core.config.operations.kv_events
    return msgspec.to_builtins(config) if config.publishes else None


def _connect(lane: EngineLane, stop: StopSignal) -> bool:
    """Dial until a gateway answers; False when asked to stop or nobody does."""
    deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
    while not stop.is_set:
        try:
            lane.connect(_CONNECT_ATTEMPT_S)
            return True
        except LaneTimeout:
            if time.monotonic() > deadline_s:
                logger.error("no gateway answered at %s for %.0f s", lane.handshake_address, _CONNECT_TIMEOUT_S)
                return False
            logger.info("waiting for a gateway at %s", lane.handshake_address)
    return False
