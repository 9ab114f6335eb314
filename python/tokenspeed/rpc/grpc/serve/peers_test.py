# SPDX-License-Identifier: MIT
"""The server among peers that are late, talkative, large, or send garbage."""

from __future__ import annotations

import random
import socket
import struct
import threading
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.processes import wait_until
from tokenspeed.engine.offline import Engine
from tokenspeed.rpc.grpc.limits import MAX_MESSAGE_ENV
from tokenspeed.rpc.grpc.serve.conftest import RunningServer, Served
from tokenspeed.rpc.grpc.serve.server import SKIP_WARMUP_ENV
from tokenspeed_protos import common_pb2
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb
from tokenspeed_protos.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
GENERATE = "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/Generate"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1


class Follower:
    """What a subscriber takes the cache for, and the numbers of the batches that told it."""

    def __init__(self, served: Served) -> None:
        self.blocks: set[int] = set()
        self.numbers: list[int] = []
        self.snapshots: list[common_pb2.KvSnapshotChunk] = []
        self._call = served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for batch in self._call:
                self._take(batch)
        except grpc.RpcError:
            return

    def _take(self, batch: common_pb2.KvEventBatch) -> None:
        if batch.HasField("load"):
            return
        if batch.HasField("snapshot"):
            self.snapshots.append(batch.snapshot)
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "stored":
                stored = event.stored
                assert not stored.HasField("parent_block_hash") or stored.parent_block_hash in self.blocks
                self.blocks.update(block.block_hash for block in stored.blocks)
            elif kind == "removed":
                self.blocks.difference_update(event.removed.block_hashes)
            else:
                self.blocks.clear()
        self.numbers.append(batch.sequence_number)

    def leave(self) -> None:
        self._call.cancel()
        self._thread.join()


def test_a_late_subscriber_knows_what_an_early_one_knows_also_under_load(served: Served) -> None:
    served.engine.operations.flush_cache()
    early, late = Follower(served), list[Follower]()

    def prompts(begin: int) -> list[list[int]]:
        shared = [7] * 48
        return [[*shared, *[(begin + number) % 40_000 + 3] * 80] for number in range(16)]

    for turn in range(6):  # 16 prompts of 8 blocks in a pool of 256: blocks come and go
        working = threading.Thread(target=served.engine.generate, args=(prompts(turn * 16), GREEDY))
        working.start()
        late.append(Follower(served))
        working.join()
    last = served.engine.kv_log.subscribe_afresh(_nothing).sequence + 1
    served.engine.kv_log.unsubscribe(_nothing)
    wait_until(lambda: all(follower.numbers and follower.numbers[-1] == last for follower in (early, *late)))
    for follower in late:
        assert follower.blocks == early.blocks
        told = follower.numbers[max(0, len(follower.snapshots) - 1) :]
        assert told == list(range(told[0], last + 1)), "a gap behind the snapshot"
        assert [chunk.index for chunk in follower.snapshots] == list(range(len(follower.snapshots)))
    assert early.blocks and any(follower.snapshots for follower in late)
    for follower in (early, *late):
        follower.leave()


def _nothing(_batch: object) -> None:
    return


def test_a_prompt_of_more_than_four_mebibytes_arrives(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    request = pb.GenerateRequest(request_id="huge", tokenized=pb.TokenizedInput(input_ids=[40_000] * 1_500_000))
    assert request.ByteSize() > 4 * 2**20
    with pytest.raises(grpc.RpcError) as refused:
        list(served.stub.Generate(request, timeout=60))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "1500000" in str(refused.value.details())
    monkeypatch.setenv(MAX_MESSAGE_ENV, "65536")
    running = RunningServer(served.engine)
    with grpc.insecure_channel(f"127.0.0.1:{running.server.port}") as channel:
        with pytest.raises(grpc.RpcError) as too_large:
            list(TokenSpeedSchedulerStub(channel).Generate(request, timeout=60))
        assert too_large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    running.stop(0.0)


def test_health_is_watched_from_the_warm_up_to_the_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.frontend.replicas[0].num_submitted
    running = RunningServer(engine)
    assert engine.frontend.replicas[0].num_submitted == before + 1, "no warm-up"
    running.stop(0.0)
    monkeypatch.setenv(SKIP_WARMUP_ENV, "1")
    running = RunningServer(engine)
    assert engine.frontend.replicas[0].num_submitted == before + 1
    with grpc.insecure_channel(f"127.0.0.1:{running.server.port}") as channel:
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        stopping = threading.Thread(target=running.stop, args=(1.0,))
        stopping.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        stopping.join()


class RawPeer:
    """A client of HTTP/2 frames, which answers nothing by itself."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.sendall(PREFACE)
        self.send(SETTINGS, 0, b"")
        self._received = b""

    def send(self, kind: int, flags: int, payload: bytes) -> None:
        self._socket.sendall(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, 0) + payload)

    def receive(self) -> tuple[int, int, bytes] | None:
        """The next frame's type, flags and payload; None once the server has hung up."""
        head = self._exactly(9)
        if head is None:
            return None
        payload = self._exactly(int.from_bytes(head[:3]))
        return None if payload is None else (head[3], head[4], payload)

    def _exactly(self, size: int) -> bytes | None:
        while len(self._received) < size:
            try:
                part = self._socket.recv(1 << 16)
            except ConnectionError:
                return None
            if not part:
                return None
            self._received += part
        taken, self._received = self._received[:size], self._received[size:]
        return taken

    def close(self) -> None:
        self._socket.close()


def test_a_client_may_ping_as_often_as_it_likes(served: Served) -> None:
    peer = RawPeer(served.server.port)
    answers = set[bytes]()
    for number in range(40):
        peer.send(PING, 0, number.to_bytes(8))
    while len(answers) < 40:
        frame = peer.receive()
        assert frame is not None and frame[0] != GOAWAY
        if frame[0] == PING and frame[1] & ACK:
            answers.add(frame[2])
    peer.close()


def test_garbage_ends_its_call_only(served: Served) -> None:
    rng = random.Random(3)
    sound = pb.GenerateRequest(request_id="garbage", tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]), stream=True)
    sound.sampling_params.max_new_tokens = 2
    raw = served.channel.unary_stream(GENERATE, lambda data: data, pb.GenerateResponse.FromString)
    payload = sound.SerializeToString()
    codes = set()
    for number in range(40):
        changed = bytearray(payload)
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = bytes(changed) if number % 3 else bytes(changed)[: rng.randrange(1, len(changed))]
        try:
            call = raw(cut if number % 5 else rng.randbytes(rng.randrange(200)), timeout=60)
            next(call)
            call.cancel()  # some mutants are requests, and some of those have no end in sight
            codes.add("ok")
        except grpc.RpcError as error:
            codes.add(error.code().name)
    assert "ok" in codes and "DEADLINE_EXCEEDED" not in codes and "UNAVAILABLE" not in codes, codes
    wait_until(lambda: not served.engine.load().active_blocks and not served.server.servicer.num_live)
    assert any(response.HasField("complete") for response in served.stub.Generate(sound, timeout=60))
