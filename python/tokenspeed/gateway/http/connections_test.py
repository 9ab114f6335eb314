# SPDX-License-Identifier: MIT
"""Slow and many connections, clients that stop in the middle, and pages of other origins."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.gateway.http.connections import LoopFaults
from tokenspeed.gateway.testing.fake_engine import Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PAGE = "https://example.org"


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningGateway]:
    with RunningGateway([replying(ids("Paris"))]) as running:
        yield running


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningGateway]:
    flags = ["--api-key", "key", "--policy", "consistent_hashing"]
    with RunningGateway([replying(ids("Paris"))], flags) as running:
        yield running


@pytest.fixture(scope="module")
def stalling() -> Iterator[RunningGateway]:
    with RunningGateway([replying(ids("Paris"))], ["--stream-body-stall-timeout-secs", "1"]) as running:
        yield running


def connect(gateway: RunningGateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=20)


def everything(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    received = b""
    try:
        while data := sock.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def metric(gateway: RunningGateway, name: str) -> float:
    lines = gateway.request("GET", "/metrics")[2].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_head_that_does_not_end_in_time_is_told_408_and_others_are_not_cut() -> None:
    with RunningGateway([replying(ids("Paris"))], ["--header-read-timeout-secs", "0.3"]) as gateway:
        slow, idle, two = connect(gateway), connect(gateway), connect(gateway)
        for sock in (slow, two):
            sock.sendall(b"GET /liveness HTTP/1.1\r\nhost: x\r\n" + (b"\r\n" if sock is two else b""))
        assert b" 200 " in two.recv(65536)
        assert everything(slow).startswith(b"HTTP/1.1 408 ")
        # One that waits for its first or next request is not in the middle of a head.
        for sock in (idle, two):
            sock.sendall(b"GET /liveness HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert b" 200 " in everything(sock)
        two_again = connect(gateway)
        two_again.sendall(b"GET /liveness HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in two_again.recv(65536)
        two_again.sendall(b"GET /live")
        assert everything(two_again).startswith(b"HTTP/1.1 408 ")
        assert metric(gateway, "smg_http_connection_timeouts_total") == 2


def test_a_request_whose_answer_takes_longer_than_a_head_may_is_answered() -> None:
    def late(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        yield Step(ids("l"), delay_s=0.6)
        yield Step(ids("ate"), "length")

    with RunningGateway([late], ["--header-read-timeout-secs", "0.2"]) as gateway:
        assert gateway.post(PATH, CHAT)[1]["choices"][0]["message"]["content"] == "late"


def test_connections_over_the_limit_are_told_503_and_a_closed_one_makes_room() -> None:
    with RunningGateway([replying(ids("Paris"))], ["--max-connections", "3"]) as gateway:
        held: list[socket.socket] = []

        def one_more() -> bool:
            """Not at once: what the start asked with may not be closed yet."""
            sock = connect(gateway)
            sock.sendall(b"GET /liveness HTTP/1.1\r\nhost: x\r\n\r\n")
            if b" 200 " in sock.recv(65536):
                held.append(sock)
            else:
                sock.close()
            return len(held) == 3

        wait_until(one_more)
        assert everything(connect(gateway)).startswith(b"HTTP/1.1 503 ")
        for sock in held:
            sock.close()
        wait_until(lambda: gateway.request("GET", "/liveness")[0] == 200)
        assert metric(gateway, "smg_http_connections_rejected_total") >= 1


def test_a_client_that_stops_in_its_body_gets_408_and_never_had_a_place() -> None:
    flags = ["--stream-body-stall-timeout-secs", "0.3", "--max-concurrent-requests", "1", "--queue-size", "0"]
    with RunningGateway([replying(ids("Paris"))], flags) as gateway:
        stuck = connect(gateway)
        stuck.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{{".encode())
        time.sleep(0.05)
        assert gateway.post(PATH, CHAT)[0] == 200
        assert b" 408 " in stuck.recv(65536)


def test_a_client_that_takes_nothing_of_its_stream_has_left() -> None:
    def endless(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        while True:
            yield Step(ids("x" * 300), delay_s=0.001)

    with RunningGateway([endless], ["--stream-body-stall-timeout-secs", "0.5"]) as gateway:
        stuck = socket.socket()
        # The system takes some megabytes for a client that takes none: fewer with a small window, and logprobs make
        # many of few tokens.
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", gateway.port))
        body = json.dumps({**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        stuck.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: bool(gateway.engines[0].seen.aborted))


def test_a_client_that_closes_its_writing_side_has_left() -> None:
    def endless(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        while True:
            yield Step(ids("x"), delay_s=0.001)

    with RunningGateway([endless]) as gateway:
        sock = gateway.send_only(PATH, {**CHAT, "stream": True})
        assert b" 200 " in sock.recv(65536)
        sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + 20
        while not gateway.engines[0].seen.aborted:
            assert time.monotonic() < deadline, "the request was not ended"
            time.sleep(0.01)
        sock.close()


@pytest.mark.parametrize(("origins", "shown"), [([PAGE], PAGE), (["*"], "*")])
def test_pages_of_allowed_origins_may_ask(origins: list[str], shown: str) -> None:
    flags = ["--cors-allowed-origins", *origins, "--api-key", "k"]
    with RunningGateway([replying(ids("Paris"))], flags) as gateway:
        asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
        status, headers, _ = gateway.request("OPTIONS", PATH, headers=asks)
        assert (status, headers["access-control-allow-origin"]) == (204, shown)
        assert "POST" in headers["access-control-allow-methods"]
        assert headers["access-control-allow-headers"] == "x-api-key"
        for body, key, expected in ((CHAT, "k", 200), ({**CHAT, "stream": True}, "k", 200), (CHAT, "no", 401)):
            status, headers, _ = gateway.request("POST", PATH, body, {"origin": PAGE, "x-api-key": key})
            assert (status, headers["access-control-allow-origin"]) == (expected, shown)
            assert "access-control-allow-credentials" not in headers
        others = gateway.request("OPTIONS", PATH, headers={**asks, "origin": "https://www.example.org"})
        assert others[0] == (204 if shown == "*" else 405)
        assert ("access-control-allow-origin" in others[1]) is (shown == "*")


def test_without_the_flag_no_other_origin_may_ask() -> None:
    with RunningGateway([replying(ids("Paris"))]) as gateway:
        status, headers, _ = gateway.request("POST", PATH, CHAT, {"origin": PAGE})
        assert status == 200 and not [name for name in headers if name.startswith("access-control")]


def answer_to(gateway: RunningGateway, data: bytes) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of the answer to these bytes."""
    with connect(gateway) as sock:
        sock.sendall(data)
        response = http.client.HTTPResponse(sock)
        response.begin()
        return response.status, json.loads(response.read())


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\0\1\2\3\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HEAD + b"broken\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        HEAD + b"content-length: -5\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"x: " + b"a" * 9000 + b"\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http_get_a_json_error_and_no_traceback_in_the_log(
    shared: RunningGateway, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = answer_to(shared, data)
    assert (status, answer["error"]["code"]) == (400, "invalid_http")
    assert "\n" not in answer["error"]["message"]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_a_body_in_an_encoding_that_is_not_known_is_415(shared: RunningGateway) -> None:
    status, answer = answer_to(shared, HEAD + b"content-encoding: br\r\ncontent-length: 1\r\n\r\nx")
    assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes() -> None:
    with RunningGateway([replying(ids("Paris"))], ["--max-payload-size", "1000"]) as gateway:
        status, answer = answer_to(gateway, HEAD + b"connection: close\r\ncontent-length: 1001\r\n\r\n")
        assert (status, answer["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("path", ["/v1/tokenize", "/v1/conversations", "/v1/messages/count_tokens", "/workers"])
def test_every_path_that_takes_a_body_stops_waiting_for_it(stalling: RunningGateway, path: str) -> None:
    status, answer = answer_to(
        stalling, f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 9\r\n\r\n{{".encode()
    )
    assert (status, answer["error"]["code"]) == (408, "request_body_timeout")


def test_a_byte_order_mark_before_the_body_is_no_part_of_it(shared: RunningGateway) -> None:
    assert shared.post(PATH, b"\xef\xbb\xbf" + json.dumps(CHAT).encode())[0] == 200


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))
from tokenspeed.gateway.testing.fake_engine import replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
with RunningGateway([replying(ids("Paris"))]) as gateway:
    print(gateway.port, flush=True)
    sys.stdin.read()
"""


def test_more_connections_than_files_get_503_and_cost_nobody_an_answer() -> None:
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", FEW_FILES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **paths},
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        sockets = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(300)]
        assert everything(sockets[-1]).startswith(b"HTTP/1.1 503 ")
        first = sockets[100]  # within the limit that the system lets it have, not within the one it came with
        first.sendall(b"GET /liveness HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b" 200 " in everything(first)
        for sock in sockets:
            sock.close()
        _, said = process.communicate("", timeout=60)
        assert "Too many open files" not in said


def test_a_listener_without_files_says_so_once_and_other_faults_are_told_as_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, faults = asyncio.new_event_loop(), LoopFaults()
    for _ in range(1000):
        faults(loop, {"message": "socket.accept()", "exception": OSError(errno.EMFILE, "Too many open files")})
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["no connection can be accepted"]
    faults(loop, {"message": "something else", "exception": ValueError("x")})
    assert len(caplog.records) == 2
    loop.close()


NOT_UTF_8 = b"\xff\xfe\xe9"


@pytest.mark.parametrize("name", [b"authorization: Bearer ", b"x-api-key: ", b"x-smg-routing-key: ", b"expect: "])
def test_headers_may_hold_any_bytes(keyed: RunningGateway, name: bytes) -> None:
    key = b"authorization: Bearer key\r\n" if name in (b"x-smg-routing-key: ", b"expect: ") else b""
    body = json.dumps(CHAT).encode()
    length = b"content-length: %d\r\nconnection: close\r\n" % len(body)
    status, answer = answer_to(keyed, HEAD + name + NOT_UTF_8 + b"\r\n" + key + length + b"\r\n" + body)
    expected = {b"x-smg-routing-key: ": (200, None), b"expect: ": (417, "expectation_failed")}
    assert (status, answer.get("error", {}).get("code")) == expected.get(name, (401, "invalid_api_key"))


def test_a_client_that_asks_before_it_sends_its_body_is_told_to(shared: RunningGateway) -> None:
    body = json.dumps(CHAT).encode()
    with connect(shared) as sock:
        sock.sendall(HEAD + b"connection: close\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert everything(sock).startswith(b"HTTP/1.1 200 ")
