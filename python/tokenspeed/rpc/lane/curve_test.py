# SPDX-License-Identifier: MIT
"""Encrypted lanes over real sockets: who has a key talks, whoever has not gets nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from tests.support.processes import free_port
from tokenspeed.config.curve import EngineCurve, GatewayCurve
from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.base import LaneOptions, LaneState
from tokenspeed.rpc.lane.engine_end import EngineLane, LaneTimeout
from tokenspeed.rpc.lane.gateway_end import GatewayLane
from tokenspeed.rpc.lane.testing import READY


def keypair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


GATEWAY_PUBLIC, GATEWAY_SECRET = keypair()
ENGINE_PUBLIC, ENGINE_SECRET = keypair()
OTHER_PUBLIC, OTHER_SECRET = keypair()
CURVE = GatewayCurve(GATEWAY_SECRET, frozenset({ENGINE_PUBLIC}))
GOOD = EngineCurve(ENGINE_SECRET, GATEWAY_PUBLIC)


@pytest.fixture
def url() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@asynccontextmanager
async def gateway(url: str, curve: GatewayCurve | None) -> AsyncIterator[GatewayLane]:
    lane = GatewayLane(url, LaneOptions(None, None, 60, curve), lambda state, reason: None)
    lane.open()
    try:
        yield lane
    finally:
        lane.close()


async def dial(url: str, curve: EngineCurve | None, timeout_s: float) -> EngineLane:
    lane = EngineLane(address.handshake_address(url), 0, READY, 1, curve)
    try:
        await asyncio.to_thread(lane.connect, timeout_s)
    except LaneTimeout:
        lane.close()
        raise
    return lane


def test_an_engine_with_its_key_registers_and_both_ways_carry_messages(url: str) -> None:
    async def scene() -> None:
        async with gateway(url, CURVE) as lane:
            engine = await dial(url, GOOD, 10)
            async with asyncio.timeout(10):
                while lane.state is not LaneState.READY:
                    await asyncio.sleep(0.005)
                call = lane.control("flush_cache", [])
                received = await asyncio.to_thread(engine.poll, 5)
                assert isinstance(received[0], wire.ControlCall)
                engine.reply(received[0], True, "done")
                assert [reply.message for reply in await call] == ["done"]
            engine.close()

    asyncio.run(scene())


STRANGERS = {
    "no key": None,
    "a key that the gateway does not know": EngineCurve(OTHER_SECRET, GATEWAY_PUBLIC),
    "another gateway's key": EngineCurve(ENGINE_SECRET, OTHER_PUBLIC),
}


@pytest.mark.parametrize("curve", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_peer_without_the_key_gets_nothing_and_the_next_one_is_served(url: str, curve: EngineCurve | None) -> None:
    async def scene() -> None:
        async with gateway(url, CURVE) as lane:
            with pytest.raises(LaneTimeout):
                await dial(url, curve, 0.7)
            assert lane.ranks == {} and not lane.dropped
            (await dial(url, GOOD, 10)).close()

    asyncio.run(scene())


def test_a_stranger_at_the_data_sockets_is_not_heard(url: str) -> None:
    async def scene() -> None:
        async with gateway(url, CURVE) as lane:
            engine = await dial(url, GOOD, 10)
            assert lane._output is not None
            with zmq.Context() as context, context.socket(zmq.PUSH) as push:
                push.setsockopt(zmq.LINGER, 0)
                push.connect(lane._output.get_string(zmq.LAST_ENDPOINT))
                push.setsockopt(zmq.SNDTIMEO, 500)
                try:
                    push.send(wire.ENGINE_CORE_DEAD)
                except zmq.Again:
                    pass  # never connected, so there was nobody to send to
                await asyncio.sleep(0.5)
            assert lane.state is LaneState.READY
            engine.close()

    asyncio.run(scene())


def test_an_engine_with_keys_says_nothing_to_a_gateway_without(url: str) -> None:
    async def scene() -> None:
        async with gateway(url, None) as lane:
            with pytest.raises(LaneTimeout):
                await dial(url, GOOD, 0.7)
            assert lane.ranks == {}

    asyncio.run(scene())
