# SPDX-License-Identifier: MIT
"""Workers that come and go, and keys that stay, where there are two gateway processes on a port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.config.member import Member, Seat, Seating
from tokenspeed.gateway.route.breaker import BreakerOptions, BreakerState
from tokenspeed.gateway.route.policy import ByLoad
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.route.worker import Worker, WorkerOptions
from tokenspeed.gateway.several.several_test import Gateways
from tokenspeed.gateway.several.to_front import ToFront
from tokenspeed.gateway.testing.fake_engine import FakeEngine
from tokenspeed.rpc.lane.base import LaneOptions


@pytest.fixture
def running() -> Iterator[Gateways]:
    gateways = Gateways()
    yield gateways
    gateways.close()


def _urls(gateways: Gateways) -> list[str]:
    return [worker["url"] for worker in gateways.listed()]


def _told(gateways: Gateways, name: str) -> list[Any]:
    return [worker.get(name) for worker in gateways.listed()]


def test_a_worker_that_is_added_serves_in_every_process_until_it_is_removed(running: Gateways) -> None:
    added = f"ipc://{running.folder.name}/lane/more"
    status, body = running.ask("POST", "/workers", {"url": added, "priority": 3})
    assert status == 202, body
    worker_id = json.loads(body)["worker_id"]
    status, body = running.ask("POST", "/workers", {"url": added})
    assert (status, json.loads(body)["error"]["code"]) == (409, "WORKER_ALREADY_EXISTS")
    for wrong in ("nonsense://x", "grpc://nowhere"):
        status, body = running.ask("POST", "/workers", {"url": wrong})
        assert (status, json.loads(body)["error"].get("param")) == (400, "url")
    engine = FakeEngine(added, running._script)
    running.others.append(engine)
    wait_until(lambda: _told(running, "state") == ["ready", "ready"])
    assert _told(running, "priority") == [0, 3]
    assert [running.chat("a", 2) for _ in range(8)] == ["aa"] * 8
    assert len(engine.seen.requests) == 8

    victim = running.children()[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: victim not in running.children() and running.num_listening() == 2)
    wait_until(lambda: _told(running, "state") == ["ready", "ready"])

    assert running.ask("PATCH", f"/workers/{worker_id}", {"priority": -1})[0] == 202
    wait_until(lambda: _told(running, "priority") == [0, -1])
    assert [running.chat("b", 2) for _ in range(8)] == ["bb"] * 8
    assert len(engine.seen.requests) == 8

    assert running.ask("DELETE", f"/workers/{worker_id}")[0] == 202
    wait_until(lambda: _urls(running) == [running.url])
    assert running.ask("DELETE", f"/workers/{worker_id}")[0] == 404
    wait_until(lambda: running.ask("POST", "/workers", {"url": added})[0] == 202)
    engine.stop()
    running.others = [FakeEngine(added, running._script)]
    wait_until(lambda: _told(running, "state") == ["ready", "ready"])


def test_requests_in_flight_end_before_their_worker_goes(running: Gateways) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(running.chat, "d", 300) for _ in range(6)]
        wait_until(lambda: running.engine.num_active == 6)
        (worker,) = running.listed()
        assert running.ask("DELETE", f"/workers/{worker['id']}")[0] == 202
        assert [running.ask("PATCH", f"/workers/{worker['id']}", {"priority": 5})[0] for _ in range(8)] == [404] * 8
        assert _told(running, "priority") == [0]
        assert [answer.result(30) for answer in answers] == ["d" * 300] * 6
    wait_until(lambda: _urls(running) == [])
    assert running.status("/readiness") == 503


def test_a_routing_key_has_one_worker_in_all_processes() -> None:
    gateways = Gateways(["--policy", "manual", "--assignment-mode", "min_group"], num_workers=3)
    try:
        homes = {}
        for key in ("k1", "k2", "k3"):
            gateways.headers = {"x-smg-routing-key": key}
            ids = set()
            for _ in range(12):
                assert gateways.chat("a", 1) == "a"
                ids.add(gateways.worker_id)
            assert len(ids) == 1
            homes[key] = ids.pop()
        assert len(set(homes.values())) == 3
        assert gateways.count("smg_manual_policy_cache_entries") == 3
    finally:
        gateways.close()


def test_a_worker_that_is_lost_is_removed_by_all_processes_where_that_is_asked_for() -> None:
    gateways = Gateways(["--remove-unhealthy-workers"], num_workers=2)
    try:
        assert len(gateways.listed()) == 2
        gateways.engine.vanish()
        wait_until(lambda: _urls(gateways) == gateways.urls[1:])
        assert [gateways.chat("c", 2) for _ in range(6)] == ["cc"] * 6
    finally:
        gateways.close()


def test_a_list_of_workers_that_was_overtaken_changes_nothing(tmp_path: Path) -> None:
    def seating(number: int, *urls: str) -> Seating:
        return Seating(number, [Seat(place, url, number) for place, url in enumerate(urls)])

    async def urls() -> list[list[tuple[str, int]]]:
        options = WorkerOptions(LaneOptions(None, None, 1.0, None), 30.0, BreakerOptions(0, 1.0, 1.0, 1))
        front = ToFront(Member(0, 2, str(tmp_path), 1))
        policy = ByLoad("random", lambda workers: workers[0])
        router = Router([], policy, replace(options, private=front.lanes), Heard())
        told = []

        def retire(worker: Worker) -> None:
            worker.lane.close()
            router.workers.remove(worker)

        for list_of in (seating(2, "ipc:///w/a", "ipc:///w/b"), seating(1, "ipc:///w/a"), seating(3, "ipc:///w/b")):
            front.apply(list_of, router, retire)
            told.append([(worker.url, worker.priority) for worker in router.workers])
        router.close()
        return told

    both = [("ipc:///w/a", 2), ("ipc:///w/b", 2)]
    assert asyncio.run(urls()) == [both, both, [("ipc:///w/b", 3)]]


class Heard:
    """A watcher that does nothing with what it hears."""

    def health(self, worker: Worker) -> None: ...

    def breaker(self, worker: Worker, old: BreakerState, new: BreakerState) -> None: ...
