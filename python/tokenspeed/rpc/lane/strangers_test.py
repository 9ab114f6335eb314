# SPDX-License-Identifier: MIT
"""Peers that knock at a gateway's handshake and are no engines, or go away again: the engine that comes is served."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq

from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.base import LaneState
from tokenspeed.rpc.lane.gateway_end import GatewayLane
from tokenspeed.rpc.lane.testing import ADD, READY, Engine, Sink, gateway, ready, until

HELLO = {"status": "HELLO"}
PAYLOADS = [
    *map(
        msgspec.msgpack.encode,
        (
            HELLO,
            HELLO | {"engine_count": -1},
            HELLO | {"engine_count": 2**40},
            HELLO | {"parallel_config_hash": "x" * 10**6},
            {"status": "READY"},
            ["HELLO"],
        ),
    ),
    b"",
    b"\x91" * 100_000,
]


async def knock(url: str, identity: bytes, payload: bytes) -> None:
    """Say it, alone and among other frames, and go."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.IDENTITY, identity)
        stranger.setsockopt(zmq.LINGER, 500)
        stranger.connect(address.handshake_address(url))
        for frames in ([payload], [payload, b"", payload]):
            stranger.send_multipart(frames)
        await asyncio.sleep(0.01)


async def serves(lane: GatewayLane, engine: Engine) -> None:
    await until(ready(lane))
    sink = Sink()
    lane.submit(ADD, sink)
    await until(lambda: bool(sink.rows))
    engine.stop()


def test_whoever_knocks_and_goes_keeps_no_engine_out(url: str) -> None:
    """A rank's place was taken by whoever had said hello, for an hour."""
    faults: list[Any] = []

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        async with gateway(url) as lane:
            for identity in (b"x", b"12345", b"a" * 200, b"\x07\x00"):
                for payload in PAYLOADS:
                    await knock(url, identity, payload)
            await serves(lane, Engine(url))

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert not faults


@pytest.mark.parametrize("count", [2, 2**40, -1])
def test_who_declares_other_ranks_and_goes_declares_nothing(url: str, count: int) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            await knock(url, b"x", msgspec.msgpack.encode(HELLO | {"engine_count": count}))
            await serves(lane, Engine(url))

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_an_engine_that_takes_its_time_between_ready_and_registration_is_served(url: str) -> None:
    """It has left the handshake by then, as those do that have gone."""

    async def scene() -> None:
        async with gateway(url) as lane:
            with zmq.Context() as context, context.socket(zmq.DEALER) as data:
                with context.socket(zmq.DEALER) as handshake:
                    for socket in (handshake, data):
                        socket.setsockopt(zmq.IDENTITY, b"\x00\x00")
                        socket.setsockopt(zmq.LINGER, 500)
                    handshake.connect(address.handshake_address(url))
                    handshake.send(msgspec.msgpack.encode(HELLO))
                    await until(lambda: bool(handshake.poll(0)))
                    init = wire.decode_init(handshake.recv())
                    handshake.send(wire.encode(wire.Ready()))
                await until(lambda: not lane.ranks)
                data.connect(init.addresses.inputs[0])
                data.send(wire.encode(READY))
                await until(ready(lane))

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_an_engine_that_is_there_keeps_its_place(url: str) -> None:
    async def scene() -> None:
        async with gateway(url) as lane:
            engine = Engine(url)
            await until(ready(lane))
            for identity in (b"x", b"12345"):
                await knock(url, identity, PAYLOADS[0])
            await until(lambda: lane.dropped["surplus_rank"] == 2)
            assert lane.state is LaneState.READY and list(lane.ranks) == [b"\x00\x00"]
            await serves(lane, engine)

    asyncio.run(asyncio.wait_for(scene(), 60))
