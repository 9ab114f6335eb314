# SPDX-License-Identifier: MIT
"""Messages that a lane holds for a moment, to send them together, lose neither their order nor their way."""

from __future__ import annotations

import asyncio
import tempfile

import msgspec

from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.base import LaneOptions, LaneState
from tokenspeed.rpc.lane.engine_end import EngineLane
from tokenspeed.rpc.lane.gateway_end import GatewayLane
from tokenspeed.rpc.lane.testing import ADD, READY

NUM_IN_A_TURN = 19


class Nobody:
    """A sink of a request that is never answered."""

    def push(self, batch: wire.BatchTokenIDOutSlim, row: int) -> None:
        raise AssertionError("the engine answers nothing")

    def fail(self, reason: str) -> None:
        """The lane is closed at the end."""


def collect(engine: EngineLane, count: int) -> list[wire.EngineMessage]:
    """The next `count` messages."""
    messages: list[wire.EngineMessage] = []
    while len(messages) < count and (more := engine.poll(20.0)):
        messages += more
    return messages


def rids(messages: list[wire.EngineMessage]) -> list[str]:
    return [message.request.rid for message in messages if isinstance(message, wire.AddRequest)]


def test_messages_of_one_turn_arrive_in_their_order_also_those_that_a_closing_lane_still_holds() -> None:
    async def scene(url: str) -> None:
        lane = GatewayLane(url, LaneOptions(1, None, 60.0), lambda state, reason: None)
        lane.open()
        engine = EngineLane(address.handshake_address(url), 0, READY, 1)
        await asyncio.to_thread(engine.connect, 10.0)
        while lane.state is not LaneState.READY:
            await asyncio.sleep(0.005)
        names = [f"r{i}" for i in range(NUM_IN_A_TURN)]
        for name in names:
            lane.submit(msgspec.structs.replace(ADD, rid=name), Nobody())
        lane.abort(["r3", names[-1]])
        messages = await asyncio.to_thread(collect, engine, NUM_IN_A_TURN + 1)
        assert rids(messages) == names
        assert messages[-1] == wire.AbortRequests(["r3", names[-1]])
        for name in ("last", "very last"):
            lane.submit(msgspec.structs.replace(ADD, rid=name), Nobody())
        lane.close()
        assert rids(await asyncio.to_thread(collect, engine, 2)) == ["last", "very last"]
        engine.close()

    with tempfile.TemporaryDirectory(prefix="lane") as folder:
        asyncio.run(asyncio.wait_for(scene(f"ipc://{folder}/w"), 60))
