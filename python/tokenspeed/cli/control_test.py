# SPDX-License-Identifier: MIT
"""The control server in front of a gateway that is not there: facts, health, and refusals by name."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tokenspeed.cli.control import ControlServer
from tokenspeed.observability.endpoint import Answer, Endpoint, json_answer


@pytest.fixture
def control() -> Iterator[ControlServer]:
    server = ControlServer(
        0,
        "http://127.0.0.1:9",
        ["http://127.0.0.1:9"],
        None,
        None,
        lambda: {"version": "1", "server_args": {"seed": None}},
    )
    yield server
    server.close()


def ask(control: ControlServer, path: str, body: bytes | None = None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{control.port}{path}", body, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_tells_what_it_was_started_with(control: ControlServer) -> None:
    assert ask(control, "/get_server_info") == (200, {"version": "1", "server_args": {"seed": None}})


def test_what_the_engine_says_of_itself_comes_before_what_was_asked_of_it() -> None:
    flags = {"sampling_backend": "auto", "weight_version": "default", "seed": 7}
    told = {"sampling_backend": "cpu", "weight_version": "v2", "num_blocks": 9, "data_parallel_rank": 0}
    engine = Endpoint("127.0.0.1", 0, {("GET", "/get_server_info"): lambda _: json_answer(200, told)})
    relay = ControlServer(
        0,
        "http://127.0.0.1:9",
        [f"http://127.0.0.1:{engine.port}"],
        None,
        None,
        lambda: {**flags, "data_parallel_rank": None, "server_args": flags},
    )
    assert ask(relay, "/get_server_info") == (
        200,
        {
            "sampling_backend": "cpu",
            "weight_version": "v2",
            "seed": 7,
            "num_blocks": 9,
            "data_parallel_rank": None,
            "server_args": flags,
        },
    )
    relay.close()
    engine.close()


def test_health_is_the_gateways(control: ControlServer) -> None:
    assert ask(control, "/health")[0] == 503


def test_the_metrics_are_the_engines_and_503_while_there_is_none(control: ControlServer) -> None:
    assert ask(control, "/metrics")[0] == 503
    text = b"tokenspeed:num_requests_total 1\n"
    engine = Endpoint("127.0.0.1", 0, {("GET", "/metrics"): lambda _: Answer(200, "text/plain; version=1", text)})
    relay = ControlServer(0, "http://127.0.0.1:9", [f"http://127.0.0.1:{engine.port}"], None, None, dict)
    with urllib.request.urlopen(f"http://127.0.0.1:{relay.port}/metrics", timeout=10) as response:
        assert (response.headers["content-type"], response.read()) == ("text/plain; version=1", text)
    relay.close()
    engine.close()


@pytest.mark.parametrize(
    ("path", "status"), [("/rebalance_experts", 501), ("/generate", 503), ("/abort", 503), ("/dance", 404)]
)
def test_what_is_not_there_is_refused_by_name(control: ControlServer, path: str, status: int) -> None:
    for body in (None, b"{}"):
        answer = ask(control, path, body)
        assert answer[0] == status and answer[1]["success"] is False
        assert path in answer[1]["message"] or status == 503


def test_controls_are_passed_on_with_their_body_and_the_key_and_the_answer_comes_back() -> None:
    def pause(body: Mapping[str, Any]) -> Answer:
        return json_answer(409, {"got": dict(body)})

    engine = Endpoint("127.0.0.1", 0, {("POST", "/pause_generation"): pause}, "s3cret")
    relay = ControlServer(0, "http://127.0.0.1:9", [f"http://127.0.0.1:{engine.port}"], "s3cret", None, dict)
    assert ask(relay, "/pause_generation", b'{"mode": "keep"}')[0] == 401
    body, headers = b'{"mode": "keep"}', {"Authorization": "Bearer s3cret"}
    request = urllib.request.Request(f"http://127.0.0.1:{relay.port}/pause_generation", body, headers)
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(request, timeout=10)
    assert answer.value.code == 409 and json.load(answer.value) == {"got": {"mode": "keep"}}
    relay.close()
    engine.close()


def test_replicas_join_a_trainers_group_one_after_the_other_and_sleep_by_a_query() -> None:
    seen: list[tuple[int, Mapping[str, Any]]] = []

    def engine(number: int) -> Endpoint:
        def take(body: Mapping[str, Any]) -> Answer:
            seen.append((number, dict(body)))
            return json_answer(200, {"success": True})

        routes = {("POST", "/init_weights_update_group"): take, ("POST", "/sleep"): take}
        facts = {("GET", "/get_server_info"): lambda _: json_answer(200, {"tensor_parallel_size": 4})}
        return Endpoint("127.0.0.1", 0, routes | facts)

    engines = [engine(number) for number in range(3)]
    urls = [f"http://127.0.0.1:{each.port}" for each in engines]
    relay = ControlServer(0, "http://127.0.0.1:9", urls, None, None, dict)
    assert ask(relay, "/init_weights_update_group", b'{"rank_offset": 1, "world_size": 13}')[0] == 200
    assert sorted((number, body["rank_offset"]) for number, body in seen) == [(0, 1), (1, 5), (2, 9)]
    seen.clear()
    assert ask(relay, "/sleep?level=2", b"")[0] == 200
    assert [body for _, body in seen] == [{"level": "2"}] * 3
    relay.close()
    for each in engines:
        each.close()


@pytest.mark.parametrize("path", ["/generate", "/health_check"])
def test_who_has_the_control_key_needs_no_key_of_the_gateway(path: str) -> None:
    def generate(body: Mapping[str, Any]) -> Answer:
        return json_answer(200, {"text": "yes"})

    gateway = Endpoint("127.0.0.1", 0, {("POST", "/generate"): generate}, "gateway's")
    relay = ControlServer(0, f"http://127.0.0.1:{gateway.port}", ["http://127.0.0.1:9"], "control's", "gateway's", dict)

    def status(key: str) -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{relay.port}{path}",
            None if path == "/health_check" else b"{}",
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert [status(key) for key in ("control's", "gateway's", "")] == [200, 401, 401]
    relay.close()
    gateway.close()
