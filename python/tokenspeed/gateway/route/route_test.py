# SPDX-License-Identifier: MIT
"""Routing, retries and deaths: every request ends once, with an answer or with an error that invites a retry."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.route.retry import RetryPolicy, with_retries
from tokenspeed.gateway.testing.fake_engine import FakeEngine, Script, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
NO_WAIT = RetryPolicy(max_attempts=4, initial_backoff_s=0, max_backoff_s=0, multiplier=1, jitter=0)


def silent(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    """Accepts everything and gives nothing."""
    while True:
        yield Step([], delay_s=0.005)


def some_then_silent(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    """A beginning of an answer, and no more."""
    yield Step(ids("begun"))
    yield from silent(request)


class Background:
    """Requests on threads, and what came of them."""

    def __init__(self, gateway: RunningGateway, num: int, stream: bool) -> None:
        self.statuses: list[int] = []
        self.events: list[list[str]] = []
        self._gateway, self._stream = gateway, stream
        self._threads = [threading.Thread(target=self._ask) for _ in range(num)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        if self._stream:
            self.events.append(self._gateway.stream(PATH, CHAT))
        else:
            status, answer = self._gateway.post(PATH, CHAT)
            self.statuses.append(status)
            self.events.append([json.dumps(answer)])

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


def num_begun(gateway: RunningGateway) -> int:
    """Streams whose clients have been sent something of their answers."""
    return sum(stream.answered for stream in list(gateway.service.keep_alive._streams))


# ---- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_dying_engine_ends_every_request_once_with_an_error_that_invites_a_retry(goodbye: bool) -> None:
    with RunningGateway([some_then_silent]) as gateway:
        streams, wholes = Background(gateway, 4, True), Background(gateway, 4, False)
        wait_until(lambda: gateway.engines[0].num_active == 8 and num_begun(gateway) == 4)
        (gateway.engines[0].stop if goodbye else gateway.engines[0].vanish)()
        streams.join()
        wholes.join()
        assert wholes.statuses == [503] * 4
        for events in streams.events:
            assert events[-1] == "[DONE]"
            assert sum("error" in json.loads(event) for event in events[:-1]) == 1
            assert json.loads(events[-2])["error"]["code"] == "worker_lost"
        assert gateway.get("/readiness")[0] == 503
        assert gateway.service.router.num_in_flight == 0


def test_an_engine_that_comes_back_serves_again() -> None:
    with RunningGateway([replying(ids("first"))]) as gateway:
        assert gateway.post(PATH, CHAT)[0] == 200
        gateway.engines[0].vanish()
        wait_until(lambda: gateway.get("/readiness")[0] == 503)
        gateway.engines.append(FakeEngine(gateway.urls[0], replying(ids("second"))))
        gateway.wait_ready(1)
        assert gateway.post(PATH, CHAT)[1]["choices"][0]["message"]["content"] == "second"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_sent_nothing_yet_goes_to_another_worker_and_gives_the_same_seed(stream: bool) -> None:
    with RunningGateway([silent, replying(ids("saved"))], ["--policy", "passthrough"]) as gateway:
        asked = Background(gateway, 1, stream)
        wait_until(lambda: gateway.engines[0].num_active == 1)
        gateway.engines[0].vanish()
        asked.join()
        answer = "".join(asked.events[0])
        if stream:
            chunks = [json.loads(event) for event in asked.events[0][:-1]]
            answer = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert "saved" in answer
        first, second = gateway.engines[0].seen.requests[0], gateway.engines[1].seen.requests[0]
        assert first.sampling_params.seed == second.sampling_params.seed
        assert first.input_ids == second.input_ids


def test_a_stream_that_has_begun_is_not_begun_again() -> None:
    with RunningGateway([some_then_silent, replying(ids("other"))], ["--policy", "passthrough"]) as gateway:
        asked = Background(gateway, 1, True)
        wait_until(lambda: num_begun(gateway) == 1)
        gateway.engines[0].vanish()
        asked.join()
        text = "".join(asked.events[0])
        assert "begun" in text and "other" not in text and "worker_lost" in text


def test_an_overloaded_engine_is_tried_again_and_a_bad_request_is_not() -> None:
    def refusing_first(status: int) -> tuple[Script, list[str]]:
        seen: list[str] = []

        def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
            seen.append(request.rid)
            if len(seen) < 3:
                yield Step([], "abort", status=status, message="not now")
            else:
                yield from replying(ids("ok"))(request)

        return script, seen

    script, seen = refusing_first(503)
    with RunningGateway([script], ["--retry-initial-backoff-ms", "1"]) as gateway:
        assert gateway.post(PATH, CHAT)[0] == 200
        assert len(set(seen)) == 3
    script, seen = refusing_first(400)
    with RunningGateway([script]) as gateway:
        for _ in range(2):
            assert gateway.post(PATH, CHAT)[0] == 400
        assert gateway.post(PATH, CHAT)[0] == 200
        assert gateway.get("/health")[0] == 200


def test_requests_spread_over_the_workers() -> None:
    with RunningGateway([replying(ids("a")), replying(ids("b"))], ["--policy", "round_robin"]) as gateway:
        texts = Counter(gateway.post(PATH, CHAT)[1]["choices"][0]["message"]["content"] for _ in range(10))
        assert texts == {"a": 5, "b": 5}


def test_prompts_with_a_common_beginning_stay_with_one_worker_and_the_metrics_say_why() -> None:
    with RunningGateway([replying(ids("a")), replying(ids("b"))]) as gateway:
        for question in ("first", "second", "third"):
            body = {"messages": [{"role": "user", "content": "a long shared preamble, " * 4 + question}]}
            assert gateway.post(PATH, body)[0] == 200
        assert sorted(len(engine.seen.requests) for engine in gateway.engines) == [0, 3]
        text = gateway.request("GET", "/metrics")[2].decode()
        assert 'smg_cache_aware_policy_branch_total{branch="tree_match"} 2.0' in text
        assert 'smg_cache_aware_policy_branch_total{branch="expected_wait_fallback"} 1.0' in text
        assert "smg_cache_tree_tokens 0.0" not in text


@pytest.mark.parametrize("policy", ["manual", "consistent_hashing"])
def test_a_routing_key_keeps_its_requests_on_one_worker(policy: str) -> None:
    with RunningGateway([replying(ids("a")), replying(ids("b"))], ["--policy", policy]) as gateway:
        for key in ("k1", "k2", "k3", "k4"):
            answers = [gateway.post(PATH, CHAT, {"x-smg-routing-key": key})[1] for _ in range(3)]
            assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1


# ---- retries, alone ------------------------------------------------------------------------------------------------


class Course:
    """A request of which the client has got something, or not; `heard` is what it was told."""

    def __init__(self, answered: bool) -> None:
        self.answered = answered
        self.heard: list[str] = []

    def on_retry(self, attempt: int, pause_s: float) -> None:
        self.heard.append("retry")

    def on_exhausted(self) -> None:
        self.heard.append("exhausted")


def run_retries(outcomes: list[object], answered: bool = False) -> tuple[object, list[str]]:
    """What `with_retries` gives when attempts give `outcomes`, and what the request heard."""
    course = Course(answered)
    attempts = iter(outcomes)

    async def attempt() -> object:
        outcome = next(attempts)
        if isinstance(outcome, ApiError):
            raise outcome
        return outcome

    try:
        return asyncio.run(with_retries(NO_WAIT, course, attempt)), course.heard
    except ApiError as error:
        return error.status, course.heard


def refusal(status: int, code: str = "x") -> ApiError:
    return ApiError(status, code, "x")


@pytest.mark.parametrize(
    ("outcomes", "answered", "expected", "heard"),
    [
        (["ok"], False, "ok", []),
        ([refusal(503), refusal(429), "ok"], False, "ok", ["retry", "retry"]),
        ([refusal(503)] * 9, False, 503, ["retry", "retry", "retry", "exhausted"]),
        ([refusal(400), "ok"], False, 400, []),
        ([refusal(504), "ok"], False, "ok", ["retry"]),
        ([refusal(504, "call_upstream_timeout"), "ok"], False, 504, []),
        ([refusal(503), "ok"], True, 503, []),
    ],
)
def test_a_fault_is_retried_while_nothing_was_answered(
    outcomes: list[object], answered: bool, expected: object, heard: list[str]
) -> None:
    assert run_retries(outcomes, answered) == (expected, heard)


def test_pauses_grow_to_a_limit_and_vary_by_the_jitter() -> None:
    policy = RetryPolicy(max_attempts=9, initial_backoff_s=0.1, max_backoff_s=0.5, multiplier=2, jitter=0.25)
    assert [policy.backoff_s(n, lambda low, high: 1.0) for n in (1, 2, 3, 4, 5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert policy.backoff_s(1, lambda low, high: low) == pytest.approx(0.075)
    assert policy.backoff_s(1, lambda low, high: high) == pytest.approx(0.125)


def test_a_name_that_only_an_engine_can_tell_is_503_until_it_is_there_and_404_afterwards() -> None:
    with RunningGateway([], ["--retry-max-retries", "1"], num_workers=1) as gateway:
        asked = {**CHAT, "model": "fake-model"}
        status, answer = gateway.post(PATH, asked)
        assert (status, answer["error"]["code"]) == (503, "no_available_workers")
        engine = FakeEngine(gateway.urls[0], replying(ids("a")))
        gateway.wait_ready(1)
        assert gateway.post(PATH, asked)[0] == 200
        status, answer = gateway.post(PATH, {**CHAT, "model": "another"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        engine.stop()
