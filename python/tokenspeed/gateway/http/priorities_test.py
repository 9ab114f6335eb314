# SPDX-License-Identifier: MIT
"""Classes of requests: who gets a place, who waits, and who is ended for another."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config.flags import FlagError
from tokenspeed.config.gateway import parse_launch
from tokenspeed.config.gateway_priorities import DEFAULTS, PriorityConfig
from tokenspeed.gateway.http.admission import rate_limit
from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.http.priorities import PriorityAdmission
from tokenspeed.gateway.testing.fake_engine import Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.observability.gateway_metrics import GatewayMetrics
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


class Scheduler:
    """`limit` places; each request holds its own until it is told to end."""

    def __init__(self, limit: int, **changes: dict[str, Any]) -> None:
        self.now_s = 0.0
        classes = {
            name: replace(rules, **{"reserved": 0, "may_preempt": False, **changes.get(name, {})})
            for name, rules in DEFAULTS.items()
        }
        config = PriorityConfig("system", classes)
        scheduler = GatewayMetrics().scheduler
        self.admission = PriorityAdmission(limit, config, rate_limit(0, limit), scheduler, lambda: self.now_s)
        self.served: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def submit(self, name: str, asked: str | None, begun: bool = False) -> None:
        """A request called `name` comes."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._request(name, asked, begun))
        await self.settle()

    async def _request(self, name: str, asked: str | None, begun: bool) -> None:
        place = self.admission.place(asked)
        place.begun = lambda: begun
        async with place:
            self.served.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        """It ends."""
        self._ends[name].set()
        await self.settle()

    async def settle(self) -> None:
        """Everything happens that can."""
        for _ in range(10):
            await asyncio.sleep(0)

    def error(self, name: str) -> tuple[int, str]:
        """What it ended with."""
        error = self.tasks[name].exception()
        assert isinstance(error, ApiError)
        return error.status, error.code


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_the_highest_class_is_next_and_within_one_the_first() -> None:
    async def test() -> None:
        scheduler = Scheduler(1)
        await scheduler.submit("first", None)
        for name, asked in (("b", "bulk"), ("d1", "nonsense"), ("d2", None), ("i", " Interactive "), ("s", "SYSTEM")):
            await scheduler.submit(name, asked)
        for name in ("first", "s", "i", "d1", "d2", "b"):
            await scheduler.end(name)
        assert scheduler.served == ["first", "s", "i", "d1", "d2", "b"]
        assert scheduler.admission.num_admitted == scheduler.admission.num_waiting == 0

    run(test)


def test_places_that_a_class_has_reserved_are_left_free_for_it() -> None:
    async def test() -> None:
        scheduler = Scheduler(3, interactive={"reserved": 2})
        await scheduler.submit("d1", None)
        await scheduler.submit("d2", None)
        await scheduler.submit("i1", "interactive")
        await scheduler.submit("i2", "interactive")
        assert scheduler.served == ["d1", "i1", "i2"]
        await scheduler.end("i1")
        assert "d2" not in scheduler.served
        await scheduler.end("d1")
        assert scheduler.served[-1] == "d2"

    run(test)


def test_whoever_has_waited_too_long_is_next() -> None:
    async def test() -> None:
        scheduler = Scheduler(2, interactive={"reserved": 1}, bulk={"starvation_s": 100.0})
        await scheduler.submit("d", None)
        await scheduler.submit("b", "bulk")
        scheduler.now_s = 101.0
        await scheduler.submit("i", "interactive")
        await scheduler.submit("i2", "interactive")
        await scheduler.end("d")
        assert scheduler.served == ["d", "i", "b"]

    run(test)


def test_a_queue_has_a_size_and_a_wait_an_end() -> None:
    async def test() -> None:
        scheduler = Scheduler(1, bulk={"queue_size": 1, "queue_timeout_s": 0.05})
        await scheduler.submit("d", None)
        await scheduler.submit("b1", "bulk")
        await scheduler.submit("b2", "bulk")
        assert scheduler.error("b2") == (429, "scheduler_queue_full")
        await asyncio.wait([scheduler.tasks["b1"]])
        assert scheduler.error("b1") == (408, "scheduler_queue_timeout")
        assert (scheduler.admission.num_rejected, scheduler.admission.num_waiting) == (2, 0)

    run(test)


def test_the_lowest_that_came_last_and_has_not_begun_is_ended_for_a_higher_class() -> None:
    async def test() -> None:
        scheduler = Scheduler(4, interactive={"may_preempt": True})
        await scheduler.submit("b1", "bulk")
        await scheduler.submit("b2", "bulk")
        await scheduler.submit("b3", "bulk", begun=True)
        await scheduler.submit("d", None)
        for name in ("i1", "i2", "i3", "i4"):
            await scheduler.submit(name, "interactive")
        ended = [name for name in ("b1", "b2", "b3", "d") if scheduler.tasks[name].done()]
        assert ended == ["b1", "b2", "d"]
        assert {scheduler.error(name) for name in ended} == {(503, "scheduler_preempted")}
        assert scheduler.served[4:] == ["i1", "i2", "i3"]
        assert scheduler.admission.num_admitted == 4
        await scheduler.end("b3")
        assert scheduler.served[-1] == "i4"

    run(test)


def test_one_that_leaves_while_it_waits_takes_no_place_along() -> None:
    async def test() -> None:
        scheduler = Scheduler(1)
        await scheduler.submit("d", None)
        for name in ("w1", "w2", "w3"):
            await scheduler.submit(name, None)
        scheduler.tasks["w1"].cancel()
        await scheduler.settle()
        scheduler._ends["d"].set()
        await asyncio.sleep(0)  # w2 is given the place, and leaves before it knows
        scheduler.tasks["w2"].cancel()
        await scheduler.settle()
        assert scheduler.served[-1] == "w3"
        await scheduler.end("w3")
        assert scheduler.admission.num_admitted == scheduler.admission.num_waiting == 0

    run(test)


def slow(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    if request.sampling_params.max_new_tokens == 7:
        while True:
            yield Step([], delay_s=0.005)
    yield from replying(ids("ok"))(request)


def test_a_preempted_request_is_told_so_and_is_ended_on_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("classes:\n  interactive: {reserved: 0}\n  system:\n    reserved: 0\n")
    flags = ["--priority-scheduler-enabled", "--priority-scheduler-config", str(file), "--max-concurrent-requests", "1"]
    flags += ["--priority-scheduler-default-max-class", "interactive"]
    with RunningGateway([slow], flags) as gateway:
        answers: list[tuple[int, dict[str, str], bytes]] = []
        body = {**CHAT, "max_tokens": 7}
        asking = threading.Thread(
            target=lambda: answers.append(gateway.request("POST", PATH, body, {"x-smg-priority": "bulk"}))
        )
        asking.start()
        deadline = time.monotonic() + 20
        while not gateway.engines[0].num_active:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert gateway.post(PATH, CHAT, {"x-smg-priority": "system"})[0] == 200
        asking.join(20)
        status, headers, content = answers[0]
        assert (status, json.loads(content)["error"]["code"]) == (503, "scheduler_preempted")
        assert (headers["x-smg-preempted"], headers["retry-after"]) == ("true", "1")
        assert gateway.engines[0].num_active == 0
        text = gateway.request("GET", "/metrics")[2].decode()
        assert 'smg_scheduler_preemption_total{by_class="interactive",victim_class="bulk"} 1.0' in text
        assert 'smg_scheduler_clamp_total{effective_class="interactive",requested_class="system"' in text
        assert 'smg_scheduler_admit_total{class="bulk",outcome="preempted"} 1.0' in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("classes: {urgent: {}}", "classes.urgent: the classes are system, interactive, default, bulk"),
        ("classes: {bulk: {queue_timeout_secs: 0}}", "classes.bulk: .* must be above 0"),
        ("classes: {bulk: {reserve: 1}}", "unknown field `reserve`"),
        ("classes: {bulk: {reserved: 5000}}", "its classes reserve 5160 places"),
        ("tenant_policies: {a: {max_class: system}}", "tenant_policies: keys are all equal"),
        ("classes: [", "while parsing"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "p.yaml"
    if content is not None:
        file.write_text(content)
    words = ["--worker-urls", "ipc:///tmp/w", "--max-concurrent-requests", "4096", "--priority-scheduler-enabled"]
    with pytest.raises(FlagError, match=message):
        parse_launch([*words, "--priority-scheduler-config", str(file)])
    with pytest.raises(FlagError, match="reserve 160 places, which is more than --max-concurrent-requests"):
        parse_launch(["--worker-urls", "ipc:///tmp/w", "--max-concurrent-requests", "100", words[-1]])
