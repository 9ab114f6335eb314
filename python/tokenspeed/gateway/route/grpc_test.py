# SPDX-License-Identifier: MIT
"""Workers behind gRPC: the same answers as over the lane, errors by status, losses, loads; a scripted servicer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.gateway.testing.fake_engine import Script, Step, replying
from tokenspeed.gateway.testing.fake_servicer import FakeServicer
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput
from tokenspeed_protos import common_pb2

REPLY = "Grüße aus der Küche 🙂"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def _script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    prompt = bytes(token - 3 for token in request.input_ids if token > 2).decode()
    if "refuse" in prompt:
        yield Step([], status=400, message="too_odd: what was asked is odd")
    if "busy" in prompt:
        yield Step([], status=429, message="queue_full: come back later")
    if "slow" in prompt:
        for _ in range(400):
            yield Step(ids("z"), delay_s=0.02)
    yield from replying(ids(REPLY), 2)(request)


def _serving(url: str) -> RunningGateway:
    return RunningGateway([], ["--worker-urls", url, "--retry-max-retries", "1"], num_workers=0)


@pytest.fixture(scope="module")
def servicer() -> Iterator[FakeServicer]:
    servicer = FakeServicer(_script)
    yield servicer
    servicer.stop()


@pytest.fixture(scope="module")
def gateway(servicer: FakeServicer) -> Iterator[RunningGateway]:
    with _serving(servicer.url) as gateway:
        gateway.wait_ready(1)
        yield gateway


@pytest.fixture(scope="module")
def lane() -> Iterator[RunningGateway]:
    with RunningGateway([_script]) as gateway:
        yield gateway


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_tokens": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": "Küche"},
        {"n": 2, "seed": 7},
        {"include_stop_str_in_output": True},
    ],
    ids=str,
)
def test_answers_are_those_of_the_lane_whole_and_streamed(
    gateway: RunningGateway, lane: RunningGateway, asked: dict[str, Any]
) -> None:
    def told(one: RunningGateway) -> object:
        status, answer = one.post("/v1/chat/completions", {**CHAT, **asked})
        assert status == 200, answer
        events = [json.loads(event) for event in one.stream("/v1/chat/completions", {**CHAT, **asked})[:-1]]
        streamed: dict[int, str] = {}
        for event in events:
            for choice in event["choices"]:
                text = streamed.get(choice["index"], "")
                streamed[choice["index"]] = text + (choice["delta"].get("content") or "")
        return answer["choices"], answer["usage"]["prompt_tokens"], streamed

    assert told(gateway) == told(lane)


def test_sampling_fields_arrive_as_the_protocol_has_them(gateway: RunningGateway, servicer: FakeServicer) -> None:
    asked = {"temperature": 0, "top_p": 0.5, "min_p": 0.25, "seed": -1, "logit_bias": {"5": 2}, "stop_token_ids": [9]}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    more = {"priority": 3, "cache_salt": "mine", "min_tokens": 1, "response_format": schema}
    assert gateway.post("/v1/chat/completions", {**CHAT, **asked, **more})[0] == 200
    sent = servicer.requests[-1]
    sampling = sent.sampling_params
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 1, 0.5, 0.25)
    assert (sampling.logit_bias["5"], list(sampling.stop_token_ids), sampling.min_new_tokens) == (2.0, [9], 1)
    assert json.loads(sampling.json_schema)["type"] == "object"
    assert (sent.priority, sent.cache_salt, sent.stream) == (3, "mine", False)
    assert sampling.HasField("sampling_seed") and not sampling.stop
    gateway.post("/v1/chat/completions", CHAT)
    assert servicer.requests[-1].sampling_params.top_k == -1


def test_the_callers_trace_goes_with_the_call(gateway: RunningGateway, servicer: FakeServicer) -> None:
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for headers, passed in (({"traceparent": given}, given), ({}, None)):
        assert gateway.post("/v1/chat/completions", CHAT, headers)[0] == 200
        assert servicer.traceparents[-1] == passed


@pytest.mark.parametrize(("word", "status", "code"), [("refuse", 400, "too_odd"), ("busy", 429, "queue_full")])
def test_what_the_engine_refuses_is_an_answer_with_its_code(
    gateway: RunningGateway, word: str, status: int, code: str
) -> None:
    got, answer = gateway.post("/v1/chat/completions", {"messages": [{"role": "user", "content": word}]})
    assert (got, answer["error"]["code"]) == (status, code)
    assert gateway.post("/v1/chat/completions", CHAT)[0] == 200


def test_a_client_that_leaves_ends_the_call_and_the_request(gateway: RunningGateway, servicer: FakeServicer) -> None:
    asked = {"messages": [{"role": "user", "content": "slow"}], "stream": True}
    with gateway.send_only("/v1/chat/completions", asked) as sock:
        assert b" 200 " in sock.recv(100)
        assert servicer.num_active == 1
    wait_until(lambda: servicer.num_active == 0)
    wait_until(lambda: servicer.requests[-1].request_id in servicer.aborted)


def test_loads_flushes_and_the_kind_of_a_worker_are_told(gateway: RunningGateway, servicer: FakeServicer) -> None:
    def rank() -> dict[str, int]:
        loads: dict[str, int] = gateway.get("/get_loads")[1]["workers"][0]["ranks"][0]
        return loads

    wait_until(lambda: rank()["waiting"] == 2)
    assert (rank()["kv_active_blocks"], rank()["kv_total_blocks"]) == (512, 1024)
    worker = gateway.get("/workers")[1]["workers"][0]
    assert (worker["connection_mode"], worker["model"], worker["url"]) == ("grpc", "fake-model", servicer.url)
    assert gateway.post("/flush_cache", {})[0] == 200
    servicer.flush_answer = (False, "requests run")
    status, answer = gateway.post("/flush_cache", {})
    servicer.flush_answer = (True, "ok")
    assert status == 409 and "requests run" in json.dumps(answer)
    _, _, metrics = gateway.request("GET", "/metrics")
    assert b'connection_mode="grpc"' in metrics and b'connection_mode="zmq"' not in metrics


def test_profiles_of_a_worker_are_its_calls(gateway: RunningGateway, servicer: FakeServicer) -> None:
    asked = {"num_steps": 2, "activities": ["CPU"]}
    status, answer = gateway.post("/start_profile", asked)
    assert (status, answer["workers"][0]["message"]) == (200, "/traces")
    assert servicer.profiles == [common_pb2.StartProfileRequest(**asked)]
    status, answer = gateway.post("/start_profile", {"profile_prefix": "a"})
    assert status == 409 and "profile_prefix" in answer["workers"][0]["message"]
    status, answer = gateway.post("/stop_profile", b"")
    assert status == 409 and "nothing is recorded" in answer["workers"][0]["message"]


def _forever(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    for _ in range(1000):
        yield Step(ids("z"), delay_s=0.02)


@pytest.mark.parametrize("script", [_forever])
def test_an_engine_that_dies_fails_its_requests_and_serves_again_when_it_is_back(script: Script) -> None:
    first = FakeServicer(script)
    with _serving(first.url) as gateway:
        gateway.wait_ready(1)
        with gateway.send_only("/v1/chat/completions", {**CHAT, "stream": True}) as sock:
            assert b" 200 " in sock.recv(100)
            first.stop()
            rest = b""
            while b"[DONE]" not in rest:
                rest += sock.recv(65536)
            assert b"worker_lost" in rest
        wait_until(lambda: gateway.request("GET", "/readiness")[0] == 503)
        assert gateway.post("/v1/chat/completions", CHAT)[1]["error"]["code"] == "no_available_workers"
        second = FakeServicer(replying(ids("back")), first.port)
        gateway.wait_ready(1)
        answer = gateway.post("/v1/chat/completions", CHAT)[1]
        assert answer["choices"][0]["message"]["content"] == "back"
        second.stop()


def test_ranks_share_requests_and_are_named_in_them() -> None:
    servicer = FakeServicer(replying(ids("a")), dp_size=2)
    with _serving(servicer.url) as gateway:
        gateway.wait_ready(1)
        for _ in range(4):
            assert gateway.post("/v1/chat/completions", CHAT)[0] == 200
    servicer.stop()
    assert sorted(request.data_parallel_rank for request in servicer.requests) == [0, 0, 1, 1]
