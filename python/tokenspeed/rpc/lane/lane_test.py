# SPDX-License-Identifier: MIT
"""Both ends of the lane against each other, over ipc and tcp, with deaths, restarts and garbage."""

from __future__ import annotations

import asyncio
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from tests.support.processes import free_port
from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.base import LaneNotReady, LaneOptions, LaneState
from tokenspeed.rpc.lane.engine_end import EngineLane, LaneLost, LaneTimeout
from tokenspeed.rpc.lane.gateway_end import GatewayLane
from tokenspeed.rpc.lane.wire_test import ADD

READY = wire.ReadyResponse(
    max_model_len=100,
    num_gpu_blocks=10,
    block_size=16,
    dtype="float32",
    vllm_version="tokenspeed-test",
    world_size=1,
    data_parallel_size=1,
    positional_layouts=wire.default_layouts(),
)


@pytest.fixture(params=["ipc", "tcp"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "tcp":
        yield f"tcp://127.0.0.1:{free_port()}"
    else:
        # Not tmp_path: a socket's path may have 107 bytes only.
        with tempfile.TemporaryDirectory(prefix="lane") as folder:
            yield f"ipc://{folder}/sockets/worker0"


class Sink:
    """Collects what a request got."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], str]] = []
        self.failures: list[str] = []

    def push(self, batch: wire.BatchTokenIDOutSlim, row: int) -> None:
        self.rows.append((batch.output_ids[row], batch.finished_reasons[row]))

    def fail(self, reason: str) -> None:
        self.failures.append(reason)


class Engine:
    """An engine end on its own thread that answers every request with its prompt, and control calls with ok."""

    def __init__(
        self, url: str, index: int = 0, count: int = 1, answer: bool = True, abort_reasons: list[str] | None = None
    ) -> None:
        said = msgspec.structs.replace(READY, abort_reasons=abort_reasons)
        self.lane = EngineLane(address.handshake_address(url), index, said, count)
        self.seen: list[wire.EngineMessage] = []
        self.lost = threading.Event()
        self._answer = answer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.lane.connect(timeout_s=10)
        try:
            while not self._stop.is_set():
                for message in self.lane.poll(0.02):
                    self.seen.append(message)
                    self._reply(message)
        except LaneLost:
            self.lost.set()
        self.lane.close()

    def _reply(self, message: wire.EngineMessage) -> None:
        if isinstance(message, wire.ControlCall):
            self.lane.reply(message, True, message.method)
        elif isinstance(message, wire.AddRequest) and self._answer:
            request = message.request
            self.lane.send(
                wire.BatchTokenIDOutSlim(
                    [request.rid],
                    [request.input_ids],
                    ["stop"],
                    [len(request.input_ids)],
                    [3],
                    [0],
                    [[]],
                    [[]],
                    self.lane.engine_index,
                    num_running=1,
                )
            )

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway(url: str, count: int | None = None, startup_timeout_s: float = 60) -> AsyncIterator[GatewayLane]:
    lane = GatewayLane(url, LaneOptions(count, None, startup_timeout_s), lambda state, reason: None)
    lane.open()
    try:
        yield lane
    finally:
        lane.close()


def ready(lane: GatewayLane) -> Callable[[], bool]:
    return lambda: lane.state is LaneState.READY


def renamed(rid: str) -> wire.PlainGenerateReqInput:
    return msgspec.structs.replace(ADD, rid=rid)


def test_a_request_reaches_the_engine_and_its_result_comes_back(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            with pytest.raises(LaneNotReady):
                lane.submit(ADD, Sink())
            engine = Engine(url)
            await until(ready(lane))
            assert lane.ready_response == READY
            sink = Sink()
            lane.submit(ADD, sink)
            await until(lambda: bool(sink.rows))
            assert sink.rows == [(ADD.input_ids, "stop")]
            assert lane.num_in_flight == 0
            engine.stop()

    asyncio.run(scene())


def test_an_engine_may_dial_before_the_gateway_is_there(url: str) -> None:
    async def scene() -> None:
        engine = Engine(url)
        await asyncio.sleep(0.3)
        async with gateway(url) as lane:
            await until(ready(lane))
            engine.stop()

    asyncio.run(scene())


def test_a_dying_engine_fails_each_request_once_and_a_new_one_serves_again(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            engine = Engine(url, answer=False)
            await until(ready(lane))
            sinks = [Sink() for _ in range(5)]
            for i, sink in enumerate(sinks):
                lane.submit(renamed(f"r{i}"), sink)
            await until(lambda: len(engine.seen) == 5)
            engine.stop()
            await until(lambda: lane.state is LaneState.HANDSHAKE)
            await until(lambda: all(sink.failures for sink in sinks))
            assert [len(sink.failures) for sink in sinks] == [1] * 5
            assert lane.num_in_flight == 0
            successor = Engine(url)
            await until(ready(lane))
            sink = Sink()
            lane.submit(renamed("r0"), sink)
            await until(lambda: bool(sink.rows))
            successor.stop()

    asyncio.run(scene())


def test_an_engine_that_dies_without_a_word_is_noticed(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            engine = Engine(url, answer=False)
            await until(ready(lane))
            sink = Sink()
            lane.submit(ADD, sink)
            await until(lambda: len(engine.seen) == 1)
            engine.lane._output = None  # nothing can be said any more, not even that it dies
            engine.stop()
            await until(lambda: len(sink.failures) == 1)
            assert lane.state is LaneState.HANDSHAKE

    asyncio.run(scene())


def test_an_engine_whose_gateway_goes_before_answering_says_hello_to_the_next_one(url: str) -> None:
    async def scene() -> None:
        engine = Engine(url)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
            deaf.bind(address.handshake_address(url))
            await until(lambda: bool(deaf.poll(0)))
        async with gateway(url) as lane:
            await until(ready(lane))
        engine.stop()

    asyncio.run(scene())


def cut_off_before_the_protocol_begins(url: str, once: socket.socket) -> None:
    """Accepts one connection at the handshake's address and ends it, as a process does that is being killed."""
    host, port = address.split_tcp(address.handshake_address(url))
    once.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    once.bind((host, port))
    once.listen()
    connection, _ = once.accept()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_an_engine_that_was_cut_off_says_one_hello_to_the_next_gateway(url: str) -> None:
    engine = EngineLane(address.handshake_address(url), 0, READY)
    hellos = 0
    with socket.socket() as dying:
        cutting = threading.Thread(target=cut_off_before_the_protocol_begins, args=(url, dying))
        cutting.start()
        with pytest.raises(LaneTimeout):
            engine.connect(timeout_s=1)
        cutting.join()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
        deaf.bind(address.handshake_address(url))
        with pytest.raises(LaneTimeout):
            engine.connect(timeout_s=3)
        while deaf.poll(200):
            deaf.recv_multipart()
            hellos += 1
        engine.close()
    assert hellos == 1


def test_a_rank_that_says_hello_twice_is_told_the_same_addresses_and_registers(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, context.socket(zmq.DEALER) as data:
                for end in (dealer, data):
                    end.setsockopt(zmq.IDENTITY, wire.identity_of(0))
                    end.setsockopt(zmq.LINGER, 0)
                dealer.connect(address.handshake_address(url))
                inits = []
                for _ in range(2):
                    dealer.send(wire.encode(wire.Hello()))
                    await until(lambda: bool(dealer.poll(0)))
                    inits.append(wire.decode_init(dealer.recv_multipart()[-1]))
                assert inits[0] == inits[1]
                data.connect(inits[0].addresses.inputs[0])
                data.send(wire.encode(READY))
                await until(ready(lane))

    asyncio.run(scene())


def test_an_engine_that_was_sent_where_nobody_listens_learns_that_the_lane_is_lost(url: str) -> None:
    engine = EngineLane(address.handshake_address(url), 0, READY)
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    addresses = wire.InitAddresses([nowhere], [nowhere], None, None, None)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as leaving:
        leaving.bind(address.handshake_address(url))
        with pytest.raises(LaneTimeout):
            engine.connect(timeout_s=0.01)
        identity, _hello = leaving.recv_multipart()
        leaving.send_multipart([identity, wire.encode(wire.Init(addresses, {}))])
        engine.connect(timeout_s=10)
        with pytest.raises(LaneLost):
            for _ in range(100):
                engine.poll(0.1)
    engine.close()


def test_short_calls_of_connect_are_as_good_as_a_long_one(url: str) -> None:
    async def scene() -> None:
        engine = EngineLane(address.handshake_address(url), 0, READY)
        hellos = 0
        with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
            deaf.bind(address.handshake_address(url))
            for _ in range(5):
                with pytest.raises(LaneTimeout):
                    engine.connect(timeout_s=0.05)
            while deaf.poll(100):
                deaf.recv_multipart()
                hellos += 1
        engine.close()
        assert hellos == 1

    asyncio.run(scene())


def test_an_engine_learns_that_its_gateway_is_gone_and_dials_the_next_one(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            engine = Engine(url)
            await until(ready(lane))
        await until(engine.lost.is_set)
        engine.stop()
        async with gateway(url) as lane:
            again = Engine(url)
            await until(ready(lane))
            again.stop()

    asyncio.run(scene())


def test_ranks_share_the_requests_and_one_death_fails_all(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            ranks = [Engine(url, index, 3, answer=False) for index in (4, 5, 6)]
            await until(ready(lane))
            sinks = [Sink() for _ in range(6)]
            for i, sink in enumerate(sinks):
                lane.submit(renamed(f"r{i}"), sink)
            await until(lambda: [len(rank.seen) for rank in ranks] == [2, 2, 2])
            replies = await lane.control("flush_cache", [1.0])
            assert sorted(reply.engine_index for reply in replies) == [4, 5, 6]
            ranks[0].stop()
            await until(lambda: all(len(sink.failures) == 1 for sink in sinks))
            await until(lambda: ranks[1].lost.is_set() and ranks[2].lost.is_set())
            for rank in ranks[1:]:
                rank.stop()

    asyncio.run(scene())


def test_a_request_goes_to_the_rank_with_the_fewest_in_flight(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            busy, idle = Engine(url, 0, 2, answer=False), Engine(url, 1, 2, answer=False)
            await until(ready(lane))
            for i in range(4):
                lane.submit(renamed(f"r{i}"), Sink())
            await until(lambda: (len(busy.seen), len(idle.seen)) == (2, 2))
            by_rank = {rank.index: rank for rank in lane.ranks.values()}
            lane.abort([rid for rid in ("r0", "r1", "r2", "r3") if lane._sinks[rid][1] is by_rank[1]])
            assert (by_rank[0].num_in_flight, by_rank[1].num_in_flight) == (2, 0)
            for i in range(4, 6):
                lane.submit(renamed(f"r{i}"), Sink())
            assert (by_rank[0].num_in_flight, by_rank[1].num_in_flight) == (2, 2)
            busy.stop()
            idle.stop()

    asyncio.run(scene())


def test_the_lane_is_not_ready_before_every_rank_has_dialled(url: str) -> None:
    async def scene() -> None:
        async with gateway(url, count=2) as lane:
            first = Engine(url, 0)
            await asyncio.sleep(0.3)
            assert lane.state is LaneState.HANDSHAKE
            second = Engine(url, 1)
            await until(ready(lane))
            first.stop()
            second.stop()

    asyncio.run(scene())


def test_ranks_that_stay_alone_are_sent_away_after_the_startup_timeout(url: str) -> None:
    async def scene() -> None:
        async with gateway(url, count=2, startup_timeout_s=0.3) as lane:
            alone = Engine(url)
            await until(alone.lost.is_set)
            alone.stop()
            assert lane.ranks == {}

    asyncio.run(scene())


@pytest.mark.parametrize("reads", [True, False])
def test_an_engine_that_reads_it_hears_that_a_text_is_complete(url: str, reads: bool) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            engine = Engine(url, answer=False, abort_reasons=["stop"] if reads else None)
            await until(ready(lane))
            lane.submit(ADD, Sink())
            lane.end([ADD.rid])
            await until(lambda: len(engine.seen) == 2)
            assert engine.seen[1] == (wire.EndRequests if reads else wire.AbortRequests)([ADD.rid])
            engine.stop()

    asyncio.run(scene())


def test_an_aborted_request_gets_nothing_more_and_the_engine_hears_of_it(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            engine = Engine(url, answer=False)
            await until(ready(lane))
            sink = Sink()
            lane.submit(ADD, sink)
            lane.abort([ADD.rid, "never-seen"])
            await until(lambda: len(engine.seen) == 2)
            assert engine.seen[1] == wire.AbortRequests([ADD.rid])
            engine._answer = True
            engine._reply(engine.seen[0])
            await until(lambda: lane.dropped["unknown_request"] == 1)
            assert sink.rows == [] and sink.failures == []
            engine.stop()

    asyncio.run(scene())


def test_a_request_id_in_flight_cannot_be_used_twice(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            engine = Engine(url, answer=False)
            await until(ready(lane))
            lane.submit(ADD, Sink())
            with pytest.raises(ValueError, match="in flight"):
                lane.submit(ADD, Sink())
            engine.stop()

    asyncio.run(scene())


def test_garbage_is_dropped_and_counted_on_both_sides(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            engine = Engine(url)
            await until(ready(lane))
            engine.lane._push(b"\xc1garbage", "x")
            await until(lambda: lane.dropped["unreadable"] == 1)
            rank = next(iter(lane.ranks.values()))
            assert lane._send(rank, [b"\x00", b"garbage"])
            await until(lambda: engine.lane.dropped["bad_request"] == 1)
            sink = Sink()
            lane.submit(ADD, sink)
            await until(lambda: bool(sink.rows))
            engine.stop()

    asyncio.run(scene())


def test_garbage_on_the_handshake_does_no_harm(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.connect(address.handshake_address(url))
                stranger.send(b"hello?")
                await until(lambda: lane.dropped["unreadable"] == 1)
            engine = Engine(url)
            await until(ready(lane))
            engine.stop()

    asyncio.run(scene())


def test_a_control_call_fails_when_the_engine_dies_before_it_answers(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            engine = Engine(url)
            await until(ready(lane))
            engine._reply = lambda message: None  # type: ignore[method-assign]
            call = lane.control("stop_profile", [])
            await until(lambda: len(engine.seen) == 1)
            engine.stop()
            with pytest.raises(LaneNotReady):
                await asyncio.wait_for(call, 10)

    asyncio.run(scene())


def test_a_gateway_that_never_answers_is_reported() -> None:
    lane = EngineLane(f"tcp://127.0.0.1:{free_port()}", 0, READY)
    with pytest.raises(LaneTimeout):
        lane.connect(timeout_s=0.2)
    lane.close()


def test_a_lane_whose_address_is_taken_can_still_be_closed(url: str) -> None:
    async def scene() -> None:
        async with gateway(url):
            second = GatewayLane(url, LaneOptions(None, None, 60), lambda state, reason: None)
            with pytest.raises(zmq.ZMQError):
                second.open()
            second.close()
            second.close()

    asyncio.run(scene())
