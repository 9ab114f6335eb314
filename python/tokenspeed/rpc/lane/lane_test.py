# SPDX-License-Identifier: MIT
"""Both ends of a lane that has come about, over ipc and tcp: requests, ranks, deaths and garbage."""

from __future__ import annotations

import asyncio

import pytest

from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.base import LaneNotReady, LaneState
from tokenspeed.rpc.lane.testing import ADD, READY, Engine, Sink, gateway, ready, renamed, until


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
