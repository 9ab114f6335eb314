# SPDX-License-Identifier: MIT
"""How a lane comes about, over ipc and tcp: who dials whom, what is said once, and whoever goes too early."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest
import zmq

from tests.support.processes import free_port
from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.base import LaneOptions, LaneState
from tokenspeed.rpc.lane.engine_end import EngineLane, LaneLost, LaneTimeout
from tokenspeed.rpc.lane.gateway_end import GatewayLane
from tokenspeed.rpc.lane.testing import READY, Engine, gateway, ready, until


def test_an_engine_may_dial_before_the_gateway_is_there(url: str) -> None:
    async def scene() -> None:
        engine = Engine(url)
        await asyncio.sleep(0.3)
        async with gateway(url) as lane:
            await until(ready(lane))
            engine.stop()

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


def count_hellos(deaf: zmq.Socket[bytes], wait_ms: int) -> int:
    """How many have come; one that is on its way still has `wait_ms`."""
    hellos = 0
    while deaf.poll(wait_ms):
        deaf.recv_multipart()
        hellos += 1
    return hellos


def test_an_engine_that_was_cut_off_says_one_hello_to_the_next_gateway(url: str) -> None:
    engine = EngineLane(address.handshake_address(url), 0, READY)
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
        hellos = count_hellos(deaf, 200)
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
    engine = EngineLane(address.handshake_address(url), 0, READY)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
        deaf.bind(address.handshake_address(url))
        for _ in range(5):
            with pytest.raises(LaneTimeout):
                engine.connect(timeout_s=0.05)
        hellos = count_hellos(deaf, 100)
    engine.close()
    assert hellos == 1


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
