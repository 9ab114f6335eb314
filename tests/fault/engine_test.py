# SPDX-License-Identifier: MIT
"""An engine whose gateway sends garbage: real requests end once each, blocks return, the engine lives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from tests.fault.garbage import every_place, mutations
from tests.fault.raw_lane import RawGateway
from tests.support.peers import Http, Program, headless_engine
from tests.support.processes import free_port
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.testing import SAMPLING

NUM_GARBAGE = 600
DEEP = [wire.FRAME_CONTROL, b"\x93\x01\xa1a" + b"\x91" * 100_000]
"""Arrays within arrays."""


@pytest.fixture(scope="module")
def control() -> Http:
    return Http(free_port())


@pytest.fixture(scope="module")
def gateway() -> Iterator[RawGateway]:
    bound = RawGateway()
    yield bound
    bound.close()


@pytest.fixture(scope="module")
def engine(gateway: RawGateway, control: Http) -> Iterator[Program]:
    with headless_engine(gateway.port, "--rl-control-port", str(control.port), "--log-level", "warning") as running:
        gateway.accept()
        yield running


def request(rid: str, max_new_tokens: int) -> bytes:
    params = msgspec.structs.replace(
        SAMPLING, max_new_tokens=max_new_tokens, stop_token_ids=None, temperature=1.0, ignore_eos=True, seed=1
    )
    plain = wire.PlainGenerateReqInput(rid, None, None, [5, 6, 7, 8], params, False, -1, 0, None, True)
    return wire.encode(plain)


def ends(gateway: RawGateway, wanted: set[str]) -> Counter[str]:
    """Terminal rows by request until every wanted one has had one, and then for a moment longer."""
    seen: Counter[str] = Counter()
    while True:
        frame = gateway.receive(300 if wanted <= seen.keys() else 60_000)
        if frame is None:
            assert wanted <= seen.keys(), f"nothing of {wanted - seen.keys()}"
            return seen
        batch = wire.decode_output(frame)
        assert isinstance(batch, wire.BatchTokenIDOutSlim)
        seen.update(rid for rid, reason in zip(batch.rids, batch.finished_reasons) if reason)


def wait_idle(control: Http) -> None:
    deadline_s = time.monotonic() + 30
    while (load := control.get("/v1/loads")["loads"][0])["num_reqs"] or load["num_pages"]:
        assert time.monotonic() < deadline_s, load
        time.sleep(0.05)


def test_garbage_among_requests_costs_no_request_and_no_block(
    engine: Program, gateway: RawGateway, control: Http
) -> None:
    wanted = set()
    for number, garbage in enumerate(mutations(request("mutant", 3), NUM_GARBAGE, seed=1)):
        gateway.send(wire.FRAME_ADD, garbage)
        if number % 60 == 0:
            wanted.add(f"real-{number}")
            gateway.send(wire.FRAME_ADD, request(f"real-{number}", 12))
    seen = ends(gateway, wanted)
    assert all(seen[rid] == 1 for rid in wanted)
    # Some mutants are requests too, and some of those have no end in sight.
    gateway.send(*wire.encode_abort(list(seen)))
    assert control.post("/abort_request", {"abort_all": True})[0] == 200
    wait_idle(control)
    assert engine.process.poll() is None


def test_other_garbage_is_dropped_too(engine: Program, gateway: RawGateway, control: Http) -> None:
    abort, call = wire.encode_abort(["a", "b"]), wire.encode_control(wire.ControlCall(1, "flush_cache", [0.0]))
    for kind, payload in (abort, call):
        for garbage in mutations(payload, NUM_GARBAGE // 4, seed=2):
            gateway.send(kind, garbage)
    for frames in ([b""], [b"\x07", b"\x90"], [b"\x00"], [b"\x00", b"\xc1", b"aux"], [b"\x03", b"\x90"], DEEP):
        gateway.send(*frames)
    gateway.send(wire.FRAME_ADD, request("after", 4))
    while "after" not in (terminal := rids_that_ended(gateway)):
        assert terminal is not None
    wait_idle(control)
    assert engine.process.poll() is None


def test_every_value_in_every_column_costs_a_line_at_most_and_no_memory(
    engine: Program, gateway: RawGateway, control: Http
) -> None:
    process = psutil.Process(engine.process.pid)
    sent, logged, held = 0, len(engine.log().splitlines()), process.memory_info().rss
    for number, garbage in enumerate(every_place(request("placed", 2))):
        gateway.send(wire.FRAME_ADD, garbage)
        sent += 1
        if number % 50 == 0:  # in step with the engine, so that what it holds is what it keeps
            gateway.send(wire.FRAME_ADD, request(f"sound-{number}", 2))
            assert ends(gateway, {f"sound-{number}"})[f"sound-{number}"] == 1
            gateway.send(*wire.encode_abort(["placed", "x"]))
    assert sent > 1000
    assert control.post("/abort_request", {"abort_all": True})[0] == 200
    wait_idle(control)
    assert engine.process.poll() is None
    lines = engine.log().splitlines()[logged:]
    assert len(lines) <= sent and not any("Traceback" in line for line in lines), lines[:20]
    assert process.memory_info().rss - held < 300 * 2**20


def test_who_waits_for_a_message_that_this_engine_does_not_read_is_told(
    engine: Program, gateway: RawGateway, control: Http
) -> None:
    """ENCODE is for encode workers; the sender would wait for its answer for good."""
    encode = msgspec.msgpack.encode(["EncodeRequest", None, None, "encode-1", "127.0.0.1", 8998, 5, []])
    cut = msgspec.msgpack.encode(["TokenizedGenerateReqInput", "cut-1"])
    for kind, payload, rid, status in (
        (wire.FRAME_ENCODE, encode, "encode-1", 501),
        (b"\x09", msgspec.msgpack.encode(["Later", "later-1"]), "later-1", 501),
        (wire.FRAME_ADD, cut, "cut-1", 400),
    ):
        gateway.send(kind, payload)
        batch = next_of(gateway, rid)
        row = batch.rids.index(rid)
        assert (batch.finished_reasons[row], batch.finished_status_codes[row]) == ("abort", status)
        assert batch.finished_messages[row]
    gateway.send(wire.FRAME_CONTROL, msgspec.msgpack.encode(["call", 7]))
    while not isinstance(reply := wire.decode_output(received(gateway)), wire.ControlReplySlim):
        pass
    assert (reply.call_id, reply.success) == ("call", False)
    assert engine.process.poll() is None


def received(gateway: RawGateway) -> bytes:
    frame = gateway.receive()
    assert frame is not None, "the engine says nothing any more"
    return frame


def next_of(gateway: RawGateway, rid: str) -> wire.BatchTokenIDOutSlim:
    """The next results that have a row of the request."""
    while True:
        output = wire.decode_output(received(gateway))
        if isinstance(output, wire.BatchTokenIDOutSlim) and rid in output.rids:
            return output


def rids_that_ended(gateway: RawGateway) -> set[str]:
    """Of the next frame of results; answers to control calls are skipped."""
    while True:
        output = wire.decode_output(received(gateway))
        if isinstance(output, wire.BatchTokenIDOutSlim):
            return {rid for rid, reason in zip(output.rids, output.finished_reasons) if reason}
