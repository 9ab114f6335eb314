# SPDX-License-Identifier: MIT
"""Whoever waits for a message that an engine cannot read is told so, also through a relay; whoever does not, is not."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import msgspec
import pytest

from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.base import LaneOptions, LaneState
from tokenspeed.rpc.lane.gateway_end import GatewayLane
from tokenspeed.rpc.lane.relay import Relay
from tokenspeed.rpc.lane.testing import ADD, Engine, Sink, ready, until
from tokenspeed.rpc.lane.unread import unread
from tokenspeed.rpc.lane.wire import UnreadCall, UnreadRequest

DEEP = b"\x91" * 100_000
ENCODE = msgspec.msgpack.encode(["EncodeRequest", None, None, "encode-1", "h", 8998, 5, [[1]]])


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def told(frames: list[bytes]) -> UnreadRequest | UnreadCall | None:
    with pytest.raises(wire.WireError) as error:
        wire.decode_engine_message(frames)
    return unread(frames, error.value)


@pytest.mark.parametrize(
    ("frames", "rid", "status"),
    [
        ([wire.FRAME_ENCODE, ENCODE, b"pixels"], "encode-1", 501),
        ([b"\x07", packed(["Later", "later-1", {}])], "later-1", 501),
        ([b"ADD", packed(["Odd", "odd-1"])], "odd-1", 501),
        ([wire.FRAME_ADD, packed(["TokenizedGenerateReqInput", "r-1", 7])], "r-1", 400),
        ([wire.FRAME_ADD, packed(["Other", "r-2"])], "r-2", 400),
    ],
)
def test_a_request_that_cannot_be_read_is_answered_by_its_id(frames: list[bytes], rid: str, status: int) -> None:
    found = told(frames)
    assert isinstance(found, UnreadRequest) and (found.rid, found.status) == (rid, status)
    assert found.message and found.code


@pytest.mark.parametrize("call_id", [3, -3, "c"])
def test_a_call_that_cannot_be_read_is_answered_by_its_number(call_id: int | str) -> None:
    found = told([wire.FRAME_CONTROL, packed([call_id, 7, "no list"])])
    assert isinstance(found, UnreadCall) and found.call_id == call_id


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\x00"],
        [b"\x03", b""],
        [b"\x03", b"\x90"],
        [b"\x03", b"\xc1"],
        [b"\x00", packed(["TokenizedGenerateReqInput", ""])],
        [b"\x00", packed(["TokenizedGenerateReqInput", "x" * 5000])],
        [b"\x00", packed({"rid": "r"})],
        [b"\x00", b"\xdd\xff\xff\xff\xff"],
        [b"\x00", DEEP],
        [b"\x01", packed(["a", 5])],
        [b"\x02", packed([None, 7])],
        [b"\x02", packed([2**64 - 1, 7])],
        [b"\x02", b"\x93\x01\xa1a" + DEEP],
    ],
)
def test_nobody_is_told_where_no_id_can_be_read(frames: list[bytes]) -> None:
    assert told(frames) is None


def test_arrays_within_arrays_are_unreadable_and_no_fault() -> None:
    """They raised RecursionError, which ended the engine."""
    for kind, payload in ((b"\x02", b"\x93\x01\xa1a\x91" + DEEP), (b"\x00", DEEP)):
        with pytest.raises(wire.WireError):
            wire.decode_engine_message([kind, payload])
    with pytest.raises(wire.WireError):
        wire.decode_ready_response(b"\x81\xa1a" + DEEP)


def test_a_relay_tells_the_gateway_that_sent_it() -> None:
    async def scene(folder: str) -> None:
        worker, home = f"ipc://{folder}/worker", f"ipc://{folder}/home"
        options = LaneOptions(None, None, 60)
        lane = GatewayLane(home, options, lambda state, reason: None)
        relay = Relay(worker, options, [address.handshake_address(home)])
        lane.open()
        relay.open()
        engine = Engine(worker, answer=False)
        try:
            await until(ready(lane))
            (rank,) = lane.ranks.values()
            sink = Sink()
            lane.submit(msgspec.structs.replace(ADD, rid="encode-1"), sink)
            assert lane._send(rank, [wire.FRAME_ENCODE, ENCODE])
            await until(lambda: bool(sink.rows))
            assert sink.rows == [([], "abort")]
            assert lane._send(rank, [wire.FRAME_ADD])
            assert lane._send(rank, [wire.FRAME_CONTROL, packed([5, 7])])
            await until(lambda: lane.dropped["unknown_call"] == 1)  # the reply to a call that the lane never made
            assert lane.state is LaneState.READY
        finally:
            engine.stop()
            relay.close()
            lane.close()

    with tempfile.TemporaryDirectory(prefix="lane") as folder:
        asyncio.run(asyncio.wait_for(scene(folder), 60))
