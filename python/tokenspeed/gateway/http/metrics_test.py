# SPDX-License-Identifier: MIT
"""Metrics of a running gateway: each moves when what it counts happens, by the amount of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import wait_until
from tokenspeed.gateway.http.admission import Admission, rate_limit
from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.testing.fake_engine import Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

PATH = "/v1/chat/completions"


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    prompt = bytes(token - 3 for token in request.input_ids if token > 2).decode()
    if "on and on" in prompt:
        while True:
            yield Step(ids("stop here, please"), delay_s=0.005)
    if "fail" in prompt:
        yield Step([], "abort", status=500, message="boom: no")
    yield from replying(ids("fine"))(request)


def samples(gateway: RunningGateway) -> dict[tuple[str, ...], float]:
    """Every sample, keyed by its name and its label values but those of workers' addresses."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(gateway.request("GET", "/metrics")[2].decode()):
        for sample in family.samples:
            values = [value for key, value in sorted(sample.labels.items()) if key not in ("worker", "model", "le")]
            key = (sample.name, *values)
            found[key] = found.get(key, 0) + sample.value
    return found


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    words = ["--sticky-sessions", "--retry-max-retries", "2", "--retry-initial-backoff-ms", "20"]
    with RunningGateway([script, script], [*words, "--tokenizer-cache-enable-l0"]) as gateway:
        yield gateway


def moved(gateway: RunningGateway, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[Any, float]:
    """What a request changed."""
    before = samples(gateway)
    gateway.request("POST", PATH, body, headers)
    after = samples(gateway)
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}


def test_a_stop_of_the_gateways_own_is_counted_with_the_tokens_behind_it(gateway: RunningGateway) -> None:
    change = moved(gateway, chat("on and on", stop="here", stream=True, max_tokens=5000))
    assert change["smg_router_local_stop_aborts_total", "regular", "chat", "grpc"] == 1
    assert change.get(("smg_router_local_stop_tail_tokens_total", "regular", "chat", "grpc"), 0) % 17 == 0
    change = moved(gateway, chat("hello", stop="none of it"))
    assert not [key for key in change if "local_stop" in key[0]]


def test_a_retry_tells_its_pause_and_the_number_of_the_attempt(gateway: RunningGateway) -> None:
    change = moved(gateway, chat("fail"))
    assert change["smg_worker_retry_backoff_seconds_count", "1"] == 1
    assert 0.015 <= change["smg_worker_retry_backoff_seconds_sum", "1"] <= 0.025
    assert change["smg_worker_retries_total", "chat", "regular"] == 1
    assert change["smg_worker_retries_exhausted_total", "chat", "regular"] == 1
    assert change["smg_worker_errors_total", "boom"] == 2


def test_a_prompt_is_found_in_caches_by_its_share(gateway: RunningGateway) -> None:
    first = moved(gateway, chat("0123456789" * 10))
    assert first["smg_cache_aware_match_ratio_count",] == 1
    again = moved(gateway, chat("0123456789" * 10))
    assert again["smg_cache_aware_match_ratio_sum",] == pytest.approx(1.0)


def test_routing_keys_are_counted_where_they_come_from_and_where_they_go(gateway: RunningGateway) -> None:
    change = moved(gateway, chat("k"), {"x-smg-routing-key": "someone"})
    assert change["smg_routing_key_source_total", "header"] == 1
    assert change["smg_worker_routing_keys_active",] == 1
    assert ("smg_routing_key_source_total", "header") not in moved(gateway, chat("k"))


def test_times_of_tokens_have_both_names_and_workers_a_state(gateway: RunningGateway) -> None:
    change = moved(gateway, chat("hello"))
    for name in ("ttft", "tpot", "time_to_first_token", "request_time_per_output_token", "generation_duration"):
        assert change[f"smg_router_{name}_seconds_count", "regular", "chat", "grpc"] == 1
    assert change["smg_router_request_duration_seconds_count", "regular", "zmq", "chat", "grpc"] == 1
    assert change["smg_http_rate_limit_total", "allowed"] == 1
    found = samples(gateway)
    assert found["smg_worker_state", "none", "available"] == 2
    assert found["smg_engine_running_requests", "0"] == 0
    assert found["smg_http_connections_active",] >= 1
    gateway.request("GET", "/nowhere")
    assert samples(gateway)["smg_http_requests_total", "GET", "other"] >= 1


def test_an_engine_shows_its_rate_while_it_gives_tokens() -> None:
    with RunningGateway([script]) as gateway:
        with gateway.send_only(PATH, chat("on and on", stream=True, max_tokens=5000)) as sock:
            assert b" 200 " in sock.recv(100)
            wait_until(lambda: samples(gateway)["smg_engine_gen_throughput", "0"])


def test_a_worker_without_an_engine_is_excluded_for_a_reason() -> None:
    with RunningGateway([script], num_workers=2) as gateway:
        found = samples(gateway)
        assert (found["smg_worker_state", "none", "available"], found["smg_worker_state", "pending", "excluded"]) == (
            1,
            1,
        )
        gateway.engines[0].vanish()
        wait_until(lambda: samples(gateway).get(("smg_worker_state", "not_ready", "excluded")) == 1)
        assert samples(gateway)["smg_worker_state", "none", "available"] == 0


async def _come(admission: Admission) -> int | None:
    """None for a request that was let in, else after how many seconds it may come again."""
    try:
        async with admission:
            return None
    except ApiError as error:
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        return error.retry_after_s


def test_requests_beyond_the_rate_are_429_until_time_has_passed() -> None:
    now_s = [0.0]
    admission = Admission(3, 10, 1.0, rate_limit(0.5, 3, lambda: now_s[0]))

    def come(number: int) -> list[int | None]:
        return [asyncio.run(_come(admission)) for _ in range(number)]

    assert come(5) == [None, None, None, 2, 2]
    now_s[0] = 2.0
    assert come(2) == [None, 2]
    now_s[0] = 1000.0
    assert come(4) == [None, None, None, 2]
    assert (admission.num_let_in, admission.num_rejected) == (7, 4)


def test_a_rate_is_a_flag() -> None:
    with RunningGateway([script], ["--rate-limit-tokens-per-second", "0.01", "--max-concurrent-requests", "2"]) as one:
        statuses = [one.request("POST", PATH, chat("x")) for _ in range(3)]
        assert [status for status, _, _ in statuses] == [200, 200, 429]
        assert 90 <= int(statuses[2][1]["retry-after"]) <= 100
        assert samples(one)["smg_http_rate_limit_total", "rejected"] == 1
