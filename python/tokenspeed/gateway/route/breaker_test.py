# SPDX-License-Identifier: MIT
"""Circuit breakers: faults of a worker take it out of use for a while, and nothing else does."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.route.breaker import Breaker, BreakerOptions, BreakerState, is_fault
from tokenspeed.gateway.testing.fake_engine import Script, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Timed:
    """A breaker, and a clock that the test sets."""

    def __init__(self, failures: int = 10) -> None:
        self.now_s = 1000.0
        self.changes: list[tuple[BreakerState, BreakerState]] = []
        options = BreakerOptions(failures=failures, window_s=120, open_s=60, successes=3)
        self.breaker = Breaker(options, lambda: self.now_s, lambda old, new: self.changes.append((old, new)))

    def fail(self, times: int, every_s: float = 0) -> BreakerState:
        for _ in range(times):
            self.breaker.failed()
            self.now_s += every_s
        return self.breaker.state

    def succeed(self, times: int) -> BreakerState:
        for _ in range(times):
            self.breaker.succeeded()
        return self.breaker.state


def test_ten_failures_in_a_row_open_it_and_nine_do_not() -> None:
    timed = Timed()
    assert timed.fail(9) is CLOSED and timed.breaker.allows
    assert timed.fail(1) is OPEN and not timed.breaker.allows


def test_a_success_between_failures_begins_the_count_anew() -> None:
    timed = Timed()
    timed.fail(9)
    timed.succeed(1)
    assert timed.fail(9) is CLOSED
    assert timed.fail(1) is OPEN


def test_failures_count_only_within_the_window() -> None:
    assert Timed().fail(10, every_s=13) is OPEN  # 117 s from the first to the last
    assert Timed().fail(30, every_s=14) is CLOSED  # any ten of them take 126 s


def test_it_is_tried_again_after_its_time_and_three_successes_close_it() -> None:
    timed = Timed()
    timed.fail(10)
    timed.now_s += 59.9
    assert timed.breaker.state is OPEN
    timed.now_s += 0.1
    assert timed.breaker.state is HALF_OPEN and timed.breaker.allows
    assert timed.succeed(2) is HALF_OPEN
    assert timed.succeed(1) is CLOSED
    assert timed.changes == [(CLOSED, OPEN), (OPEN, HALF_OPEN), (HALF_OPEN, CLOSED)]


def test_one_failure_while_it_is_tried_opens_it_for_the_whole_time_again() -> None:
    timed = Timed()
    timed.fail(10)
    timed.now_s += 60
    timed.succeed(2)
    assert timed.fail(1) is OPEN
    timed.now_s += 59
    assert timed.breaker.state is OPEN
    timed.now_s += 1
    assert timed.succeed(2) is HALF_OPEN and timed.succeed(1) is CLOSED


def test_answers_that_come_late_leave_an_open_breaker_open() -> None:
    timed = Timed()
    timed.fail(10)
    assert timed.succeed(5) is OPEN
    timed.now_s += 60
    assert timed.succeed(2) is HALF_OPEN


def test_a_breaker_without_a_threshold_never_opens() -> None:
    assert Timed(failures=0).fail(1000) is CLOSED


@pytest.mark.parametrize(
    ("status", "fault"),
    [(status, False) for status in (400, 404, 422, 429, 501, 503)] + [(status, True) for status in (500, 502, 504)],
)
def test_only_a_fault_of_the_worker_counts(status: int, fault: bool) -> None:
    assert is_fault(ApiError(status, "x", "x")) is fault


def refusing(status: int) -> Script:
    def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        yield Step([], "abort", status=status, message="no")

    return script


def test_a_worker_that_fails_gets_exactly_ten_requests_and_the_clients_get_answers() -> None:
    flags = ["--policy", "round_robin", "--retry-initial-backoff-ms", "1"]
    with RunningGateway([refusing(500), replying(ids("good"))], flags) as gateway:
        assert Counter(gateway.post(PATH, CHAT)[0] for _ in range(30)) == {200: 30}
        bad = gateway.engines[0]
        assert len(bad.seen.requests) == 10
        text = gateway.request("GET", "/metrics")[2].decode()
        assert f'smg_worker_cb_state{{worker="{gateway.urls[0]}"}} 1.0' in text
        assert f'smg_worker_cb_state{{worker="{gateway.urls[1]}"}} 0.0' in text
        assert f'smg_worker_cb_outcomes_total{{outcome="failure",worker="{gateway.urls[0]}"}} 10.0' in text
        assert 'smg_worker_cb_transitions_total{from="closed",to="open"' in text


def test_a_worker_that_recovers_is_used_again() -> None:
    broken = [True]

    def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        yield from (refusing(500) if broken else replying(ids("back")))(request)

    flags = ["--policy", "passthrough", "--retry-initial-backoff-ms", "1", "--cb-failure-threshold", "2"]
    flags += ["--cb-timeout-duration-secs", "0", "--cb-success-threshold", "1"]
    with RunningGateway([script, replying(ids("other"))], flags) as gateway:
        for _ in range(3):
            assert gateway.post(PATH, CHAT)[1]["choices"][0]["message"]["content"] == "other"
        broken.clear()
        assert gateway.post(PATH, CHAT)[1]["choices"][0]["message"]["content"] == "back"


@pytest.mark.parametrize("status", [400, 429, 503])
def test_refusals_and_a_busy_worker_open_nothing(status: int) -> None:
    with RunningGateway([refusing(status), replying(ids("x"))], ["--policy", "round_robin", "--disable-retries"]) as gw:
        assert Counter(gw.post(PATH, CHAT)[0] for _ in range(50)) == {200: 25, status: 25}
        assert f'smg_worker_cb_state{{worker="{gw.urls[0]}"}} 0.0' in gw.request("GET", "/metrics")[2].decode()


def test_a_single_worker_is_never_shed_by_its_own_breaker() -> None:
    with RunningGateway([refusing(500)], ["--disable-retries"]) as gateway:
        answers = [gateway.post(PATH, CHAT) for _ in range(15)]
        assert {(status, body["error"]["code"]) for status, body in answers} == {(500, "engine_refused")}
        assert len(gateway.engines[0].seen.requests) == 15


def test_2048_requests_at_once_to_one_worker_wait_or_get_429_and_its_breaker_stays_closed() -> None:
    opened = threading.Event()

    def gated(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        while not opened.is_set():
            yield Step([], delay_s=0.01)
        yield from replying(ids("x"))(request)

    async def ask_all(url: str) -> tuple[Counter[int], set[str | None]]:
        statuses, retry_after = Counter[int](), set[str | None]()

        async def ask(session: aiohttp.ClientSession) -> None:
            async with session.post(url, json=CHAT) as answer:
                statuses[answer.status] += 1
                if answer.status == 429:
                    retry_after.add(answer.headers.get("retry-after"))
                if statuses.total() == 2048 - 16 - 32:
                    opened.set()  # all but those that are served or wait have been refused

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(ask(session) for _ in range(2048)))
        return statuses, retry_after

    with RunningGateway([gated], ["--max-concurrent-requests", "16", "--queue-size", "32"]) as gateway:
        assert asyncio.run(ask_all(gateway.url(PATH))) == ({429: 2000, 200: 48}, {"2"})
        text = gateway.request("GET", "/metrics")[2].decode()
        assert f'smg_worker_cb_state{{worker="{gateway.urls[0]}"}} 0.0' in text
        assert 'outcome="failure"' not in text
        assert gateway.post(PATH, CHAT)[0] == 200


def test_a_half_open_breaker_lets_no_more_trials_through_at_once_than_it_needs() -> None:
    timed = Timed()
    timed.fail(10)
    timed.now_s += 60
    trials = [timed.breaker.begin() for _ in range(3)]
    assert trials == [True] * 3 and not timed.breaker.allows
    timed.breaker.end(trials.pop())
    assert timed.breaker.allows
    timed.succeed(3)
    assert timed.breaker.begin() is False
    timed.breaker.end(False)
    for trial in trials:
        timed.breaker.end(trial)
    timed.fail(10)
    timed.now_s += 60
    assert timed.breaker.allows
