# SPDX-License-Identifier: MIT
"""Two replicas behind one gRPC server and our gateway: ranks by name, their loads and events, and the death of one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import psutil
import pytest
import zmq

from tests.support.peers import Http, grpc_engine, grpc_serves, own_gateway, write_model_folder
from tests.support.processes import free_port, wait_until
from tokenspeed_protos import common_pb2
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb
from tokenspeed_protos.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub

LIMIT_S = 60


class Stack:
    """A gateway and the server behind it, whose replicas publish KV events at two ports in a row."""

    def __init__(self, model_folder: Path) -> None:
        self.port, http_port, self.control = free_port(), free_port(), Http(free_port())
        self.events_port = _free_pair({self.port, http_port, self.control.port})
        events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{self.events_port}"}
        self.server = grpc_engine(
            self.port,
            "--data-parallel-size=2",
            "--block-size=16",
            f"--rl-control-port={self.control.port}",
            f"--kv-events-config={json.dumps(events)}",
            "--log-level=error",
        )
        self.server.wait_for(lambda: grpc_serves(self.port))
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub: Any = TokenSpeedSchedulerStub(self.channel)
        self.http = Http(http_port)
        self.gateway = own_gateway(
            http_port, model_folder, "--worker-urls", f"grpc://127.0.0.1:{self.port}", "--disable-retries"
        )
        self.gateway.wait_for(lambda: self.http.status("/readiness") == 200)

    @property
    def replicas(self) -> list[psutil.Process]:
        """Those that live, by rank."""
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        found = [child for child in children if "tokenspeed.engine.replica" in child.cmdline()]
        return sorted(found, key=lambda child: child.cmdline()[-1])

    def call(self, rid: str, num_tokens: int, prompt: list[int], rank: int | None) -> Any:
        request = pb.GenerateRequest(request_id=rid, tokenized=pb.TokenizedInput(input_ids=prompt), stream=True)
        request.sampling_params.temperature, request.sampling_params.max_new_tokens = 0.0, num_tokens
        request.sampling_params.ignore_eos = True
        if rank is not None:
            request.data_parallel_rank = rank
        return self.stub.Generate(request, timeout=LIMIT_S)

    def running(self) -> list[int]:
        loads = self.stub.GetLoads(pb.GetLoadsRequest()).loads
        return [load.num_running_reqs for load in sorted(loads, key=lambda load: load.dp_rank)]

    def complete(self, **fields: Any) -> tuple[int, Any]:
        return self.http.post("/v1/completions", {"model": self.model, "prompt": "Hello", "max_tokens": 3, **fields})

    @property
    def model(self) -> str:
        return str(self.http.get("/v1/models")["data"][0]["id"])

    def stop(self) -> None:
        self.channel.close()
        self.gateway.kill()
        self.server.kill()


def _free_pair(taken: set[int]) -> int:
    """A port that is free with the one behind it."""
    while True:
        port = free_port()
        if {port, port + 1} & taken:
            continue
        with zmq.Context() as context, context.socket(zmq.PUB) as probe:
            try:
                probe.bind(f"tcp://127.0.0.1:{port + 1}")
                return port
            except zmq.ZMQError:
                continue


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder)
    running = Stack(folder)
    yield running
    running.stop()


def refusal(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        list(call)
    return refused.value


def test_requests_go_to_the_rank_that_they_name_and_loads_tell_it(stack: Stack) -> None:
    calls = [stack.call(f"named-{number}", 900, [5, 6, 7], 1) for number in range(2)]
    for call in calls:
        next(call)
    wait_until(lambda: stack.running() == [0, 2])
    one = stack.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    assert one.dp_rank_count == 2 and [load.dp_rank for load in one.loads] == [1]
    info = stack.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.server_args["dp_size"] == 2 and info.server_args["max_num_seqs"] == 16
    for call in calls:
        call.cancel()
    wait_until(lambda: stack.running() == [0, 0])
    wrong = refusal(stack.call("out-of-range", 1, [5], 2))
    assert wrong.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(wrong.trailing_metadata())["tokenspeed-error-field"] == "data_parallel_rank"


def test_a_rank_may_be_named_over_http_too(stack: Stack) -> None:
    for rank in (0, 1):
        assert stack.complete(data_parallel_rank=rank)[0] == 200
        body = {"text": "Hi", "sampling_params": {"max_new_tokens": 2}, "data_parallel_rank": rank}
        assert stack.http.post("/generate", body)[0] == 200
    for rank in (2, -1):
        status, answer = stack.complete(data_parallel_rank=rank)
        assert (status, answer["error"]["param"]) == (400, "data_parallel_rank"), answer


def test_every_rank_has_metrics_and_kv_events_of_its_own(stack: Stack) -> None:
    told = stack.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=LIMIT_S)
    with zmq.Context() as context, context.socket(zmq.SUB) as second:
        second.connect(f"tcp://127.0.0.1:{stack.events_port + 1}")
        second.subscribe(b"")
        prompt, published, seen = [number + 3 for number in range(40)], None, set[int]()
        for number in range(100):  # PUB drops what nobody has subscribed to yet
            for rank in (0, 1):
                list(stack.call(f"kv-{number}-{rank}", 1, [number + 2, *prompt], rank))
            if second.poll(50):
                published = msgspec.msgpack.decode(second.recv_multipart()[-1])
                break
        assert published is not None and published[2] == 1
    for batch in told:
        if any(event.HasField("stored") for event in batch.events):
            seen.add(batch.dp_rank)
        if seen == {0, 1}:
            told.cancel()
            break
    assert [row["dp_rank"] for row in stack.control.get("/v1/loads")["loads"]] == [0, 1]


def test_a_rank_that_is_killed_ends_its_requests_once_and_serves_again_beside_the_other(stack: Stack) -> None:
    lost = [stack.call(f"lost-{number}", 1900, [5, 6, 7], 1) for number in range(2)]
    kept = stack.call("kept", 100, [5, 6, 7], 0)
    for call in (*lost, kept):
        next(call)
    os.kill(stack.replicas[1].pid, signal.SIGKILL)
    for call in lost:
        assert refusal(call).code() is grpc.StatusCode.UNAVAILABLE
    assert [r.complete.finish_reason for r in kept if r.HasField("complete")] == ["length"]
    health = stack.stub.HealthCheck(pb.HealthCheckRequest(), timeout=LIMIT_S)
    assert health.healthy and ("[1] are gone" in health.message or len(stack.running()) == 2)
    wait_until(lambda: len(stack.running()) == 2)
    assert [r.complete.finish_reason for r in stack.call("again", 2, [5], 1) if r.HasField("complete")] == ["length"]
    wait_until(lambda: stack.complete(data_parallel_rank=1)[0] == 200)  # the gateway looks once a second
    assert [stack.complete()[0] for _ in range(4)] == [200] * 4
    wait_until(lambda: stack.control.get("/v1/loads")["loads"][0]["num_pages"] == 0)


def test_no_replica_outlives_its_server(stack: Stack) -> None:
    left = stack.replicas
    assert len(left) == 2
    os.kill(stack.server.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(process.is_running() for process in left))
