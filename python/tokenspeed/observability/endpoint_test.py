# SPDX-License-Identifier: MIT
"""The small HTTP server through real connections: routes, keys, bodies, faults."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tokenspeed.observability.endpoint import Answer, Endpoint, Paths, json_answer
from tokenspeed.observability.pass_on import PassOn


def echo(body: Mapping[str, Any]) -> Answer:
    return json_answer(200, {"got": dict(body)})


def size(body: Mapping[str, Any]) -> Answer:
    return json_answer(200, {"size": len(body["text"])})


def broken(_: Mapping[str, Any]) -> Answer:
    raise RuntimeError("a bug")


ROUTES = {("POST", "/echo"): echo, ("GET", "/broken"): broken, ("GET", "/open"): echo, ("POST", "/large"): size}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    listening = Endpoint("127.0.0.1", 0, ROUTES, "secret", Paths(frozenset({"/open"}), frozenset({"/large"})))
    yield listening
    listening.close()


def ask(
    endpoint: Endpoint, method: str, path: str, body: bytes = b"", key: str | None = "secret"
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_a_body_reaches_its_handler_and_a_query_is_no_part_of_the_path(endpoint: Endpoint) -> None:
    assert ask(endpoint, "POST", "/echo?x=1", b'{"a": 1}') == (200, {"got": {"a": 1}})
    assert ask(endpoint, "POST", "/echo") == (200, {"got": {}})


@pytest.mark.parametrize("body", [b"[1]", b"{", b"3"])
def test_a_body_that_is_no_object_is_400(endpoint: Endpoint, body: bytes) -> None:
    assert ask(endpoint, "POST", "/echo", body)[0] == 400


@pytest.mark.parametrize("key", [None, "", "secre", "secret2"])
def test_without_the_key_only_open_paths_answer(endpoint: Endpoint, key: str | None) -> None:
    assert ask(endpoint, "POST", "/echo", key=key)[0] == 401
    assert ask(endpoint, "GET", "/nowhere", key=key)[0] == 401
    assert ask(endpoint, "GET", "/open", key=key)[0] == 200


def test_a_wrong_method_and_an_unknown_path_are_named(endpoint: Endpoint) -> None:
    status, answer = ask(endpoint, "GET", "/echo")
    assert status == 405 and "/echo takes POST" in answer["message"]
    status, answer = ask(endpoint, "GET", "/nowhere")
    assert status == 404 and "/nowhere" in answer["message"] and answer["success"] is False


def test_a_handler_that_fails_is_a_500_and_the_next_request_works(endpoint: Endpoint) -> None:
    assert ask(endpoint, "GET", "/broken")[0] == 500
    assert ask(endpoint, "GET", "/open")[0] == 200


def test_two_requests_may_use_one_connection(endpoint: Endpoint) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
    for number in (1, 2):
        connection.request("POST", "/echo", json.dumps({"n": number}), {"Authorization": "bearer secret"})
        assert json.loads(connection.getresponse().read()) == {"got": {"n": number}}
    connection.close()


def test_a_large_body_is_for_the_path_that_takes_it_and_for_those_who_have_the_key(endpoint: Endpoint) -> None:
    body = json.dumps({"text": "x" * (3 << 20)}).encode()
    assert ask(endpoint, "POST", "/large", body) == (200, {"size": 3 << 20})
    # Others are refused by the number of bytes, before any is read.
    for path, key, status in (("/echo", "secret", 413), ("/large", None, 401), ("/large", "other", 401)):
        connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", str(len(body)))
        if key is not None:
            connection.putheader("Authorization", f"Bearer {key}")
        connection.endheaders()
        assert connection.getresponse().status == status
        connection.close()


def dies_after(listening: socket.socket, answer: bytes) -> None:
    """A server that takes one request, says `answer` and is gone."""
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(answer)


@pytest.mark.parametrize("head", [b"Transfer-Encoding: chunked\r\n\r\n4\r\npart\r\n", b"Content-Length: 9\r\n\r\npart"])
def test_a_server_that_dies_amid_its_answer_cuts_it_for_the_caller_and_leaves_no_trace(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr("socketserver.BaseServer.handle_error", lambda *_: raised.append(1))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dying = threading.Thread(target=dies_after, args=(listening, b"HTTP/1.1 200 OK\r\n" + head))
        dying.start()
        to = PassOn(f"http://127.0.0.1:{listening.getsockname()[1]}")
        endpoint = Endpoint("127.0.0.1", 0, {}, None, Paths(passed_on={"/text": to}))
        connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=10)
        connection.request("POST", "/text", b"{}")
        with pytest.raises(http.client.IncompleteRead):
            connection.getresponse().read()
        dying.join()
        endpoint.close()
    assert raised == []
