# SPDX-License-Identifier: MIT
"""The HTTP surface: health, errors, ids, keys, limits, leaving clients, draining; a real server, a scripted engine."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests.support.processes import wait_until
from tokenspeed.config.gateway import parse_launch
from tokenspeed.gateway.app import _drain, gateway, run
from tokenspeed.gateway.http.auth import KeyCheck
from tokenspeed.gateway.http.connections import Connections
from tokenspeed.gateway.http.server import HttpOptions, Server
from tokenspeed.gateway.start_error import StartError
from tokenspeed.gateway.testing.fake_engine import END_TOKEN, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids, write_tokenizer
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def endless(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    """A token every few milliseconds, for ever."""
    while True:
        yield Step(ids("x"), delay_s=0.003)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningGateway]:
    with RunningGateway([replying(ids("Paris"))]) as gateway_:
        yield gateway_


def test_an_answer_that_a_handler_raises_is_counted_by_its_own_status(running: RunningGateway) -> None:
    async def gone(request: web.Request) -> web.Response:
        raise web.HTTPGone(text="it was here")

    async def ask() -> int:
        connections = Connections(0, 0, running.service.metrics)
        options = HttpOptions(1000, [], 0, [], connections)
        server = Server(running.service, KeyCheck([]), options, [web.get("/gone", gone)])
        async with TestClient(TestServer(server.app)) as client:
            return (await client.get("/gone")).status

    assert asyncio.run(ask()) == 410
    counted = [
        line
        for line in running.request("GET", "/metrics")[2].decode().splitlines()
        if "smg_http_responses_total" in line
    ]
    assert [line for line in counted if 'path="/gone"' in line and 'status_code="410"' in line]
    assert not [line for line in counted if 'path="/gone"' in line and "499" in line]


# ---- health and models -------------------------------------------------------------------------------------------


def test_a_gateway_without_an_engine_is_alive_but_not_ready_and_says_why() -> None:
    with RunningGateway([], num_workers=1) as alone:
        assert alone.get("/liveness") == (200, {"status": "ok"})
        assert alone.get("/readiness") == (503, {"status": "not ready", "workers": 1, "workers_ready": 0})
        status, health = alone.get("/health")
        assert (status, health["workers"][0]["state"]) == (503, "absent")
        assert alone.get("/v1/models") == (200, {"object": "list", "data": []})
        status, answer = alone.post(PATH, CHAT)
        assert (status, answer["error"]["code"]) == (503, "no_available_workers")
        assert alone.request("POST", PATH, CHAT)[1]["retry-after"] == "1"


def test_a_ready_gateway_says_so_and_lists_its_model(running: RunningGateway) -> None:
    assert running.get("/readiness") == (200, {"status": "ready", "workers": 1, "workers_ready": 1})
    assert running.get("/health")[0] == 200
    model = running.get("/v1/models")[1]["data"][0]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake-model", "model", 8192)
    assert running.get("/v1/models/fake-model")[1] == model
    status, answer = running.get("/v1/models/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_an_engine_with_work_that_says_nothing_is_unhealthy_until_it_speaks_again() -> None:
    with RunningGateway([replying(ids("late"))], ["--worker-stale-secs", "0.2"]) as stuck:
        assert stuck.get("/health")[0] == 200
        stuck.engines[0].paused.set()
        assert stuck.get("/health")[0] == 200  # nothing to do is no silence
        thread = threading.Thread(target=stuck.post, args=(PATH, CHAT))
        thread.start()
        wait_until(lambda: stuck.get("/health")[0] == 503)
        assert stuck.get("/health")[1]["workers"][0]["state"] == "stalled"
        assert stuck.get("/readiness")[0] == 503
        stuck.engines[0].paused.clear()
        thread.join(10)
        wait_until(lambda: stuck.get("/health")[0] == 200)


def test_metrics_count_requests_tokens_and_workers(running: RunningGateway) -> None:
    assert running.post(PATH, CHAT)[0] == 200
    status, headers, body = running.request("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    text = body.decode()
    assert 'smg_http_requests_total{method="POST",path="/v1/chat/completions"}' in text
    assert 'token_type="output"' in text and "smg_router_ttft_seconds_bucket" in text
    assert f'smg_worker_health{{worker="{running.urls[0]}"}} 1.0' in text


def test_every_scrape_shows_the_load_of_the_engines_that_are_there_and_of_no_other() -> None:
    with RunningGateway([replying(ids("a"))], ["--health-check-interval-secs", "3600"]) as lone:

        def load_is_shown() -> bool:
            return b"tokenspeed:num_requests_running{" in lone.request("GET", "/metrics")[2]

        assert load_is_shown()
        lone.engines[0].vanish()
        wait_until(lambda: not load_is_shown())


def test_a_background_task_that_dies_ends_the_gateway_instead_of_passing_unseen(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    argv = ["--worker-urls", f"ipc://{tmp_path}/w", "--model-path", str(tmp_path), "--host", "127.0.0.1", "--port", "0"]

    def broken() -> None:
        raise ZeroDivisionError

    async def serve() -> None:
        async with gateway(parse_launch([*argv, "--health-check-interval-secs", "0.01"])) as (service, _):
            service.gauges.refresh = broken  # type: ignore[method-assign]
            await asyncio.sleep(20)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(serve())
    assert caught.group_contains(ZeroDivisionError)


# ---- errors, ids, keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing/here", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_an_unknown_address_is_an_error_with_a_code(
    running: RunningGateway, method: str, path: str, status: int, code: str
) -> None:
    got, headers, body = running.request(method, path, b"{}" if method == "POST" else None)
    assert (got, json.loads(body)["error"]["code"], headers["x-smg-error-code"]) == (status, code, code)


def test_every_answer_carries_the_request_id_of_the_client_or_a_new_one(running: RunningGateway) -> None:
    for path, body in ((PATH, CHAT), (PATH, {}), (PATH, CHAT | {"stream": True}), ("/missing", {})):
        assert running.request("POST", path, body, {"x-request-id": "mine-1"})[1]["x-request-id"] == "mine-1"
        assert running.request("POST", path, body, {"x-correlation-id": "c-2"})[1]["x-request-id"] == "c-2"
        first, second = (running.request("POST", path, body)[1]["x-request-id"] for _ in range(2))
        assert first != second


def test_a_request_id_that_could_break_a_header_is_not_taken_over(running: RunningGateway) -> None:
    assert running.request("GET", "/liveness", None, {"x-request-id": "a" * 300})[1]["x-request-id"] != "a" * 300


def test_a_body_over_the_limit_is_refused_and_the_next_request_works() -> None:
    with RunningGateway([replying(ids("ok"))], ["--max-payload-size", "1000"]) as small:
        status, answer = small.post(PATH, {"messages": [{"role": "user", "content": "x" * 2000}]})
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert small.post(PATH, CHAT)[0] == 200


def test_a_body_that_is_not_packed_as_its_headers_say_is_the_callers_fault(
    running: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    packed = {"content-encoding": "gzip"}
    for path in (PATH, "/v1/tokenize", "/v1/messages"):
        status, answer = running.post(path, b"no gzip at all" * 100, packed)
        assert (status, answer["error"]["code"]) == (400, "invalid_body")
        assert "gzip" in answer["error"]["message"]
    assert running.post(PATH, CHAT)[0] == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_very_long_stop_string_is_refused_before_any_work_is_done_for_it(running: RunningGateway) -> None:
    status, answer = running.post(PATH, CHAT | {"stop": ["x" * 1025]})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_value", "stop")
    assert running.post(PATH, CHAT | {"stop": ["x" * 1024]})[0] == 200


def test_generation_needs_one_of_the_keys_but_health_does_not() -> None:
    with RunningGateway([replying(ids("ok"))], ["--api-key", "k-one", "--api-key", "k-two"]) as locked:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic k-one"}, {"authorization": ""}):
            status, answer_headers, body = locked.request("POST", PATH, CHAT, headers)
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
            assert answer_headers["www-authenticate"] == "Bearer"
            assert b"k-one" not in body
        for key in ("k-one", "k-two"):
            assert locked.post(PATH, CHAT, {"authorization": f"Bearer {key}"})[0] == 200
        assert locked.get("/health")[0] == 200
        assert locked.post("/v1/tokenize", {"prompt": "x"})[0] == 401


def refusing(status: int, message: str) -> Any:
    def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        yield Step([], "abort", status=status, message=message)

    return script


@pytest.mark.parametrize(
    ("status", "message", "code", "text"),
    [
        (400, "context_length_exceeded: the pool is too small", "context_length_exceeded", "the pool is too small"),
        (400, "No code here.", "engine_refused", "No code here."),
        (500, "numerical error", "engine_refused", "numerical error"),
        (400, "grammar_error: no text satisfies it", "grammar_error", "no text satisfies it"),
    ],
)
def test_a_refusal_of_the_engine_becomes_its_status_with_code_and_message(
    status: int, message: str, code: str, text: str
) -> None:
    with RunningGateway([refusing(status, message)], ["--disable-retries"]) as refused:
        for stream in (False, True):
            got, answer = refused.post(PATH, CHAT | {"stream": stream})
            assert (got, answer["error"]["code"], answer["error"]["message"]) == (status, code, text)


@pytest.mark.parametrize(
    ("asked", "message", "param", "text"),
    [
        ({}, "context_length_exceeded: prompt: too long", "messages", "messages: too long"),
        ({"max_completion_tokens": 3}, "odd: max_new_tokens is", "max_completion_tokens", "max_completion_tokens is"),
        ({"guided_regex": "a"}, "grammar_error: regex: no", "guided_regex", "guided_regex: no"),
        ({"structured_outputs": {"regex": "a"}}, "grammar_error: regex: no", *["structured_outputs.regex"] * 2),
        ({}, "grammar_error: nothing: no", None, "nothing: no"),
    ],
)
def test_a_field_that_the_engine_names_is_named_as_the_caller_called_it(
    asked: dict[str, Any], message: str, param: str | None, text: str
) -> None:
    with RunningGateway([refusing(400, message)], ["--disable-retries"]) as refused:
        error = refused.post(PATH, CHAT | asked)[1]["error"]
        assert error["param"] == param and error["message"].startswith(text)


def test_an_abort_without_a_status_is_an_end_like_others() -> None:
    def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        yield Step(ids("half"))
        yield Step([], "abort")

    with RunningGateway([script]) as aborted:
        choice = aborted.post(PATH, CHAT)[1]["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("half", "abort")


# ---- limits --------------------------------------------------------------------------------------------------------


def test_requests_over_the_limit_wait_and_those_over_the_queue_get_429_and_no_fault_is_counted() -> None:
    flags = ["--max-concurrent-requests", "2", "--queue-size", "1", "--queue-timeout-secs", "20"]
    with RunningGateway([replying(ids("ok"))], flags) as busy:
        busy.engines[0].paused.set()
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(busy.post(PATH, CHAT)[0])) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: busy.service.admission.num_waiting == 1 and busy.service.admission.num_admitted == 2)
        status, headers, body = busy.request("POST", PATH, CHAT)
        assert (status, json.loads(body)["error"]["code"]) == (429, "admission_queue_full")
        assert headers["retry-after"] == "2"
        busy.engines[0].paused.clear()
        for thread in threads:
            thread.join(10)
        assert results == [200] * 3
        assert busy.service.admission.num_admitted == 0
        for _ in range(2):
            text = busy.request("GET", "/metrics")[2].decode()
            assert "smg_admission_queue_rejected_total 1.0" in text and "smg_admission_inflight 0.0" in text
        worker = busy.urls[0]
        assert re.search(rf'smg_worker_requests_total{{model="[^"]+",worker="{worker}"}} 3.0', text)
        assert f'smg_engine_kv_capacity_tokens{{worker="{worker}"}} {1024 * 16}.0' in text
        assert busy.get("/health")[0] == 200


def test_a_wait_that_is_too_long_ends_with_429() -> None:
    flags = ["--max-concurrent-requests", "1", "--queue-timeout-secs", "0.1"]
    with RunningGateway([endless], flags) as busy:
        sock = busy.send_only(PATH, CHAT | {"stream": True})
        wait_until(lambda: busy.service.admission.num_admitted == 1)
        status, answer = busy.post(PATH, CHAT)
        assert (status, answer["error"]["code"]) == (429, "admission_queue_timeout")
        sock.close()
        wait_until(lambda: busy.service.admission.num_admitted == 0)


def test_a_request_that_takes_too_long_ends_with_504_and_is_aborted() -> None:
    with RunningGateway([endless], ["--request-timeout-secs", "0.3"]) as slow:
        status, answer = slow.post(PATH, CHAT)
        assert (status, answer["error"]["code"]) == (504, "request_timeout")
        events = slow.stream(PATH, CHAT)
        assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "request_timeout"
        wait_until(lambda: len(slow.engines[0].seen.aborted) == 2 and slow.engines[0].num_active == 0)


def test_a_silent_stream_gets_comments() -> None:
    with RunningGateway([replying(ids("ok"))], ["--sse-keepalive-secs", "0.1"]) as quiet:
        quiet.engines[0].paused.set()
        sock = quiet.send_only(PATH, CHAT | {"stream": True})
        received = b""
        while received.count(b": keep-alive") < 2:
            received += sock.recv(4096)
        assert b"200 OK" in received and b"data:" not in received
        quiet.engines[0].paused.clear()
        while b"[DONE]" not in received:
            received += sock.recv(4096)
        sock.close()


# ---- clients that leave, and shutdown --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(stream: bool) -> None:
    with RunningGateway([endless]) as left:
        sock = left.send_only(PATH, CHAT | {"n": 3, "stream": stream})
        wait_until(lambda: left.engines[0].num_active == 3)
        sock.close()
        wait_until(lambda: left.engines[0].num_active == 0)
        assert left.service.router.num_in_flight == 0
        wait_until(lambda: left.service.num_open == 0)


class _Drained:
    """A gateway whose drain a test can start, as SIGTERM would."""

    def __init__(self, running: RunningGateway, flags: list[str]) -> None:
        self.config = parse_launch(["--worker-urls", *running.urls, *flags])
        self.hurry = asyncio.Event()
        self.future = asyncio.run_coroutine_threadsafe(_drain(running.service, self.config, self.hurry), running._loop)


def test_a_shutdown_flips_readiness_at_once_lets_streams_finish_and_refuses_new_requests() -> None:
    def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        for _ in range(20):
            yield Step(ids("x"), delay_s=0.02)
        yield Step([END_TOKEN], "stop")

    with RunningGateway([script]) as leaving:
        results: list[list[str]] = []
        threads = [threading.Thread(target=lambda: results.append(leaving.stream(PATH, CHAT))) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: leaving.engines[0].num_active == 3)
        drained = _Drained(leaving, ["--shutdown-grace-period-secs", "20"])
        wait_until(lambda: leaving.service.draining)
        assert leaving.get("/readiness")[1]["status"] == "draining"
        assert leaving.get("/liveness")[0] == 200
        status, answer = leaving.post(PATH, CHAT)
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert not drained.future.done()
        for thread in threads:
            thread.join(20)
        drained.future.result(10)
        assert [events[-1] for events in results] == ["[DONE]"] * 3
        assert all(json.loads(events[-2])["choices"][0]["finish_reason"] == "stop" for events in results)


def test_streams_that_outlive_the_grace_time_are_told_so() -> None:
    with RunningGateway([endless]) as leaving:
        results: list[list[str]] = []
        thread = threading.Thread(target=lambda: results.append(leaving.stream(PATH, CHAT)))
        thread.start()
        wait_until(lambda: leaving.engines[0].num_active == 1)
        _Drained(leaving, ["--shutdown-grace-period-secs", "0.2"]).future.result(10)
        thread.join(10)
        assert results[0][-1] == "[DONE]" and json.loads(results[0][-2])["error"]["code"] == "worker_lost"


def test_requests_are_still_taken_in_the_settle_time() -> None:
    with RunningGateway([replying(ids("ok"))]) as leaving:
        drained = _Drained(leaving, ["--shutdown-settle-secs", "1", "--shutdown-grace-period-secs", "5"])
        wait_until(lambda: leaving.get("/readiness")[0] == 503)
        assert leaving.post(PATH, CHAT)[0] == 200
        leaving._loop.call_soon_threadsafe(drained.hurry.set)
        drained.future.result(10)


# ---- start -----------------------------------------------------------------------------------------------------------


def test_metrics_may_have_a_port_of_their_own(tmp_path: Any) -> None:
    with RunningGateway([], ["--prometheus-port", "0"], num_workers=1) as running:
        assert running.request("GET", "/metrics")[0] == 200


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (["--model-path", "/no/such/model"], 2),
        (["--worker-urls", "ipc://relative"], 1),
    ],
)
def test_a_gateway_that_cannot_start_says_why_in_one_line(
    flags: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [] if "--worker-urls" in flags else ["--worker-urls", "tcp://127.0.0.1:1"]
    assert run(parse_launch([*urls, "--host", "127.0.0.1", "--port", "0", *flags])) in (status, 1)
    error = capsys.readouterr().err
    assert [line for line in error.splitlines() if line.startswith("smg launch: error: ")]


def test_a_port_in_use_is_reported(running: RunningGateway) -> None:
    async def start() -> None:
        config = parse_launch([*running._argv, "--port", str(running.port), "--worker-urls", "tcp://127.0.0.1:39391"])
        async with gateway(config):
            pass

    with pytest.raises(StartError, match=r"cannot listen|cannot be opened"):
        asyncio.run(start())


def test_a_port_that_another_program_has_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other, tempfile.TemporaryDirectory(prefix="gw") as folder:
        port = other.getsockname()[1]
        argv = ["--worker-urls", f"ipc://{folder}/w", "--model-path", str(tmp_path), "--host", "127.0.0.1"]
        assert run(parse_launch([*argv, "--port", str(port), "--history-path", f"{folder}/history.sqlite"])) == 1
    assert f"smg launch: error: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


# ---- long inputs -------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_by_far_is_refused_without_encoding_all_of_it(
    running: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    tokenizer = running.service.model.tokenizer
    encode = tokenizer.encode

    def counting(text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", counting)
    long = "word " * 400_000
    chat = {"messages": [{"role": "user", "content": long}]}
    for path, body, param in (
        (PATH, chat, "messages"),
        ("/v1/completions", {"prompt": ["short", long]}, "prompt"),
        ("/v1/messages", {**chat, "max_tokens": 3}, "messages"),
        ("/v1/responses", {"input": long}, "input"),
        ("/generate", {"text": long}, "text"),
    ):
        encoded.clear()
        status, answer = running.post(path, body)
        assert status == 400 and "the context is 8192 tokens" in answer["error"]["message"]
        assert answer["error"].get("code", "context_length_exceeded") == "context_length_exceeded"
        assert answer["error"].get("param", param) == param
        assert sum(encoded) < 100_000


def test_tokenize_and_detokenize_have_limits_of_their_own(running: RunningGateway) -> None:
    status, answer = running.post("/v1/tokenize", {"prompt": "x" * 4_194_305})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "string_above_max_length", "prompt")
    assert running.post("/v1/tokenize", {"prompt": "x" * 20_000})[1]["count"] == 20_000
    status, answer = running.post("/v1/detokenize", {"tokens": [5] * 1_048_577})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "array_above_max_length", "tokens")
    assert len(running.post("/v1/detokenize", {"tokens": [100] * 20_000})[1]["text"]) == 20_000
