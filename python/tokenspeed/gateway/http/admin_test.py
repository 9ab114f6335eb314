# SPDX-License-Identifier: MIT
"""Loads, flushes, and workers that come and go while the gateway runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.gateway.testing.fake_engine import FakeEngine, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def delete(gateway: RunningGateway, path: str) -> tuple[int, dict[str, Any]]:
    status, _, body = gateway.request("DELETE", path)
    return status, json.loads(body)


def answer(gateway: RunningGateway) -> str:
    return str(gateway.post(PATH, CHAT)[1]["choices"][0]["message"]["content"])


class Gate:
    """An engine's script that answers when the test opens it."""

    def __init__(self, text: str) -> None:
        self.opened = threading.Event()
        self._text = text

    def __call__(self, request: TokenizedGenerateReqInput) -> Iterator[Step]:
        while not self.opened.is_set():
            yield Step([], delay_s=0.005)
        yield from replying(ids(self._text))(request)


@pytest.mark.parametrize("path", ["/get_loads", "/loads"])
def test_loads_show_every_rank_of_every_worker(path: str) -> None:
    gate = Gate("done")
    with RunningGateway([gate], num_workers=2) as gateway:
        asked = threading.Thread(target=gateway.post, args=(PATH, CHAT))
        asked.start()
        wait_until(lambda: gateway.engines[0].num_active == 1)
        wait_until(lambda: bool(gateway.get(path)[1]["workers"][0]["ranks"][0]["running"]))
        first, second = gateway.get(path)[1]["workers"]
        assert (first["worker"], first["state"], first["load"]) == (gateway.urls[0], "ready", 1)
        rank = {"rank": 0, "in_flight": 1, "running": 1, "waiting": 0, "kv_active_blocks": 1, "kv_total_blocks": 1024}
        assert first["ranks"] == [rank]
        assert second == {"worker": gateway.urls[1], "state": "absent", "load": 0, "ranks": []}
        gate.opened.set()
        asked.join(20)
        wait_until(lambda: gateway.get(path)[1]["workers"][0]["load"] == 0)


def test_a_flush_reaches_every_worker_and_the_policy_forgets_what_they_had() -> None:
    with RunningGateway([replying(ids("a")), replying(ids("b"))]) as gateway:
        answer(gateway)
        assert gateway.service.router.policy.num_remembered > 0
        status, body = gateway.post("/flush_cache", b"")
        assert (status, body["success"]) == (200, True)
        assert [worker["url"] for worker in body["workers"]] == gateway.urls
        assert [[call.method for call in engine.seen.controls] for engine in gateway.engines] == [["flush_cache"]] * 2
        assert gateway.service.router.policy.num_remembered == 0


def test_a_flush_that_some_worker_refuses_says_which_and_why() -> None:
    with RunningGateway([replying(ids("a")), replying(ids("b"))]) as gateway:
        gateway.engines[1].control_answer = (False, "requests are running")
        status, body = gateway.post("/flush_cache", b"")
        assert (status, body["error"]["code"], body["success"]) == (409, "flush_incomplete", False)
        assert [worker["success"] for worker in body["workers"]] == [True, False]
        assert (body["workers_flushed"], body["total_workers"]) == (1, 2)
        assert body["workers"][1]["message"] == "rank 0: requests are running"
        assert gateway.urls[1] in body["error"]["message"] and gateway.urls[0] not in body["error"]["message"]


def test_a_flush_without_an_engine_is_a_503() -> None:
    with RunningGateway([], num_workers=1) as gateway:
        status, body = gateway.post("/flush_cache", b"")
        assert (status, body["error"]["code"]) == (503, "no_available_workers")


def test_a_profile_is_started_and_stopped_in_every_engine() -> None:
    with RunningGateway([replying(ids("a")), replying(ids("b"))]) as gateway:
        assert gateway.post("/start_profile", b"")[0] == 200
        gateway.engines[1].control_answer = (True, "the trace is in /traces")
        status, body = gateway.post("/start_profile", {"num_steps": 3, "activities": ["CPU"]})
        assert (status, body["success"], body["workers"][1]["message"]) == (200, True, "the trace is in /traces")
        assert gateway.post("/stop_profile", b"")[0] == 200
        for engine in gateway.engines:
            assert [(call.method, call.args) for call in engine.seen.controls] == [
                ("start_profile", [{}]),
                ("start_profile", [{"num_steps": 3, "activities": ["CPU"]}]),
                ("stop_profile", []),
            ]


def test_a_profile_that_an_engine_refuses_says_which_and_why_and_no_caller_chooses_its_folder() -> None:
    with RunningGateway([replying(ids("a")), replying(ids("b"))]) as gateway:
        gateway.engines[0].control_answer = (False, "activities: GPU: there is none")
        status, body = gateway.post("/start_profile", {"activities": ["GPU"]})
        assert (status, body["error"]["code"]) == (409, "profile_refused")
        assert [worker["success"] for worker in body["workers"]] == [False, True]
        assert "GPU" in body["workers"][0]["message"] and gateway.urls[0] in body["error"]["message"]
        for field, value in (("output_dir", "/tmp"), ("num_steps", 0), ("start_step", 2**70), ("steps", 3)):
            status, body = gateway.post("/start_profile", {field: value})
            assert status == 400 and field in body["error"]["message"]
        assert len(gateway.engines[0].seen.controls) == 1


def test_a_worker_that_is_added_serves_and_one_that_is_deleted_finishes_and_is_gone(tmp_path: Path) -> None:
    gate = Gate("old")
    with RunningGateway([gate]) as gateway:
        old = gateway.get("/workers")[1]["workers"][0]
        assert (old["url"], old["state"], old["circuit_breaker"], old["ranks"]) == (
            gateway.urls[0],
            "ready",
            "closed",
            1,
        )
        asked: list[str] = []
        waiting = threading.Thread(target=lambda: asked.append(answer(gateway)))
        waiting.start()
        wait_until(lambda: gateway.engines[0].num_active == 1)

        url = f"ipc://{tmp_path}/lane/new"
        status, headers, body = gateway.request("POST", "/workers", {"url": url})
        added = json.loads(body)
        assert (status, headers["location"]) == (202, f"/workers/{added['worker_id']}")
        assert gateway.get(added["location"])[1]["state"] == "absent"
        gateway.engines.append(FakeEngine(url, replying(ids("new"))))
        gateway.wait_ready(2)

        location = f"/workers/{old['id']}"
        assert delete(gateway, location)[0] == 202
        wait_until(lambda: gateway.get(location)[1]["state"] == "draining")
        assert delete(gateway, location)[0] == 202
        assert {answer(gateway) for _ in range(5)} == {"new"}
        gate.opened.set()
        waiting.join(20)
        assert asked == ["old"]
        wait_until(lambda: gateway.get(location)[0] == 404)
        assert [worker["url"] for worker in gateway.get("/workers")[1]["workers"]] == [url]
        assert gateway.urls[0] not in gateway.request("GET", "/health")[2].decode()
        wait_until(
            lambda: (
                f'smg_worker_health{{worker="{gateway.urls[0]}"}}' not in gateway.request("GET", "/metrics")[2].decode()
            )
        )
        assert answer(gateway) == "new"


def test_the_last_worker_may_go_and_come_back_under_its_url() -> None:
    with RunningGateway([replying(ids("a"))]) as gateway:
        worker = gateway.get("/workers")[1]["workers"][0]
        assert delete(gateway, f"/workers/{worker['id']}")[0] == 202
        wait_until(lambda: gateway.get("/workers")[1] == {"workers": [], "total": 0})
        assert gateway.post(PATH, CHAT)[1]["error"]["code"] == "no_available_workers"
        assert gateway.post("/workers", {"url": gateway.urls[0]})[1]["worker_id"] == worker["id"]
        gateway.wait_ready(1)
        assert answer(gateway) == "a"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"url": "http://host:1"}, 400, "invalid_value"),
        ({"url": "tcp://127.0.0.1:notaport"}, 400, "invalid_value"),
        ({}, 400, "missing_required_parameter"),
        ({"url": "tcp://127.0.0.1:1", "priority": "high"}, 400, "invalid_type"),
        ({"url": "tcp://127.0.0.1:1", "color": 3}, 400, "invalid_type"),
        (b"{", 400, "invalid_json"),
    ],
)
def test_a_worker_that_cannot_be_is_refused_and_leaves_nothing(body: object, status: int, code: str) -> None:
    with RunningGateway([], num_workers=1) as gateway:
        got, answered = gateway.post("/workers", body)
        assert (got, answered["error"]["code"]) == (status, code)
        assert gateway.get("/workers")[1]["total"] == 1


def test_a_worker_that_is_here_already_is_refused_by_code() -> None:
    with RunningGateway([], num_workers=1) as gateway:
        status, body = gateway.post("/workers", {"url": gateway.urls[0]})
        assert (status, body["error"]["code"]) == (409, "WORKER_ALREADY_EXISTS")
        assert gateway.get("/workers/nobody")[1]["error"]["code"] == "worker_not_found"
        assert delete(gateway, "/workers/nobody")[0] == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/get_loads"),
        ("GET", "/loads"),
        ("POST", "/flush_cache"),
        ("GET", "/workers"),
        ("POST", "/workers"),
        ("GET", "/workers/x"),
        ("DELETE", "/workers/x"),
    ],
)
def test_operators_need_a_key_where_keys_are_set(method: str, path: str) -> None:
    with RunningGateway([], ["--api-key", "secret"], num_workers=1) as gateway:
        assert gateway.request(method, path)[0] == 401
        assert gateway.request(method, path, None, {"authorization": "Bearer secret"})[0] != 401


def test_workers_of_a_higher_priority_are_asked_first_and_it_can_be_changed() -> None:
    with RunningGateway([replying(ids("a")), replying(ids("b"))], ["--policy", "round_robin"]) as gateway:
        second = gateway.get("/workers")[1]["workers"][1]["id"]

        def texts() -> set[str]:
            chat = {"messages": [{"role": "user", "content": "hi"}]}
            answers = [gateway.post("/v1/chat/completions", chat)[1] for _ in range(6)]
            return {answer["choices"][0]["message"]["content"] for answer in answers}

        assert texts() == {"a", "b"}
        assert gateway.request("PATCH", f"/workers/{second}", {"priority": 5})[0] == 202
        assert texts() == {"b"}
        assert gateway.get(f"/workers/{second}")[1]["priority"] == 5
        assert gateway.request("PATCH", f"/workers/{second}", {})[0] == 202
        assert texts() == {"b"}
        assert gateway.request("PUT", f"/workers/{second}", {})[0] == 202
        assert texts() == {"a", "b"}
        assert gateway.request("PATCH", f"/workers/{second}", {"url": "tcp://127.0.0.1:5"})[0] == 400
        assert gateway.request("PATCH", "/workers/nobody", {"priority": 5})[0] == 404


@pytest.mark.parametrize("name", ["id", "url", "number"])
def test_a_request_may_name_its_worker(name: str) -> None:
    with RunningGateway([replying(ids("a")), replying(ids("b"))], ["--policy", "round_robin"]) as gateway:
        worker = gateway.get("/workers")[1]["workers"][1]
        header = {"x-smg-target-worker": worker.get(name, "1")}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        answers = [gateway.post("/v1/chat/completions", chat, header)[1] for _ in range(4)]
        assert {answer["choices"][0]["message"]["content"] for answer in answers} == {"b"}
        status, answer = gateway.post("/v1/chat/completions", chat, {"x-smg-target-worker": "7"})
        assert (status, answer["error"]["code"]) == (400, "worker_not_found")
        gateway.engines[1].stop()
        status, answer = gateway.post("/v1/chat/completions", chat, header)
        assert (status, answer["error"]["code"]) == (503, "no_available_workers")


def test_a_worker_whose_engine_queues_is_avoided_and_shed_if_all_do() -> None:
    flags = ["--policy", "round_robin", "--worker-overload-waiting-requests", "4", "--retry-max-retries", "1"]
    with RunningGateway([replying(ids("a")), replying(ids("b"))], [*flags, "--worker-overload-shed"]) as gateway:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        gateway.engines[0].num_waiting = 4
        for _ in range(2):
            assert gateway.post("/v1/chat/completions", chat)[0] == 200
        texts = [gateway.post("/v1/chat/completions", chat)[1] for _ in range(4)]
        assert {answer["choices"][0]["message"]["content"] for answer in texts} == {"b"}
        gateway.engines[1].num_waiting = 9
        assert gateway.post("/v1/chat/completions", chat)[0] == 200
        status, answer = gateway.post("/v1/chat/completions", chat)
        assert (status, "overloaded" in answer["error"]["message"]) == (503, True)
