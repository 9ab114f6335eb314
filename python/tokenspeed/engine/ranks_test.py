# SPDX-License-Identifier: MIT
"""Two ranks of an engine, each a loop with a scheduler: the second repeats what the first does, or says that it cannot.

Without processes: the real leader and the real follower over socket pairs, loops with an executor that has a script.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.engine.errors import EngineFault
from tokenspeed.engine.follower import Follower
from tokenspeed.engine.leader import Leader, Peer
from tokenspeed.engine.loop_test import Bench
from tokenspeed.engine.messages import Abort, AbortAll, Control
from tokenspeed.engine.rank_link import LinkLost, Orders, ReportReader, Reports
from tokenspeed.grammar import GrammarCompiler
from tokenspeed.parallel import Group

Script = Callable[[int, int], int]


def usual(request: int, length: int) -> int:
    return (request + length) % 90


class TwoRanks:
    """A bench to step by hand and one that follows it on a thread of its own."""

    def __init__(self, depth: int = 1, theirs: Script = usual, timeout_s: float = 20.0) -> None:
        orders, their_orders = socket.socketpair()
        reports, self._their_reports = socket.socketpair()
        peer = Peer(1, Orders(orders, 5.0), ReportReader(reports), None, time.monotonic())
        self.leader = Leader([peer], timeout_s)
        self.bench, self.other = Bench(depth, usual), Bench(depth, theirs)
        self.bench.loop.mirror = self.leader
        self.reports = Reports(self._their_reports)
        self.follower = Follower(Orders(their_orders, None), self.reports, Group(1, 2))
        self.other.loop.mirror = self.follower.mirror
        admission: Any = self.other.loop.admission
        compiler: GrammarCompiler = admission._grammars
        admission._grammars = self.follower.grammars(compiler)
        self.fault: Exception | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self.follower.follow(self.other.loop)
        except (EngineFault, LinkLost) as error:
            self.fault = error
            self.reports.send(fault=type(error).__name__, text=str(error))
        else:
            self.hang_up()  # as a process that ends does

    def ends(self) -> None:
        """Let the first rank stop, and the other one come to an end."""
        self.bench.loop.settle_all()
        self.leader.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def hang_up(self) -> None:
        self._their_reports.close()


def steps_of(bench: Bench) -> list[tuple[Any, ...]]:
    """Everything that was launched, row by row, and when it settled."""
    plans: list[Any] = [work.plan for work in bench.executor.works]
    columns = ("request_ids", "slots", "query_lens", "context_lens", "table_updates", "prompt_token_ids")
    rows = [tuple(getattr(plan, name).tolist() for name in columns) for plan in plans]
    return [*rows, tuple(bench.executor.events)]


def play(ranks: TwoRanks, seed: int) -> None:
    """A hundred turns of traffic: requests, aborts, constraints, operators, and turns in which nothing happens."""
    dice, bench, loop = random.Random(seed), ranks.bench, ranks.bench.loop
    names: list[str] = []
    for number in range(100):
        for _ in range(dice.choice([0, 0, 0, 1, 3])):
            names.append(f"r{len(names)}")
            constraint = {"regex": dice.choice(["a+", "bad", "b+"])} if dice.random() < 0.2 else {}
            bench.add(names[-1], dice.randint(1, 60), max_new_tokens=dice.randint(1, 12), **constraint)
        if names and dice.random() < 0.2:
            bench.desk.commands.append(Abort(dice.sample(names, min(2, len(names)))))
        if dice.random() < 0.02:
            bench.desk.commands.append(AbortAll("nobody listens"))
        if dice.random() < 0.05:
            bench.desk.commands.append(Control("flush_cache", [], lambda *_: None))
        if number == 30:
            bench.backend.go.set()
            threading.Timer(0.2, ranks.other.backend.go.set).start()  # the other rank takes its time
        loop.step()
        if dice.random() < 0.1:
            loop.pause(dice.choice(["abort", "wait", "keep"]))
        elif dice.random() < 0.5:
            loop.resume()
        if dice.random() < 0.05:
            loop.set_weight_version(number)
        if dice.random() < 0.05:
            loop.flush_cache()
    loop.resume()
    while loop.requests.all():
        loop.step()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_when_all_ranks_plan_the_same_steps(seed: int, depth: int) -> None:
    ranks = TwoRanks(depth)
    play(ranks, seed)
    ranks.ends()
    assert ranks.fault is None
    assert len(steps_of(ranks.bench)) > 20
    assert steps_of(ranks.other) == steps_of(ranks.bench)


def step_until_it_fails(ranks: TwoRanks) -> EngineFault:
    with pytest.raises(EngineFault) as caught:
        for _ in range(2000):
            ranks.bench.loop.step()
            ranks.leader.check()
            time.sleep(0.005)
    ranks.leader.close()
    return caught.value


def test_ranks_that_draw_other_tokens_end_the_engine_in_words() -> None:
    ranks = TwoRanks(theirs=lambda request, length: usual(request, length) + (length == 9))
    ranks.bench.add("a", 4, max_new_tokens=100)
    fault = step_until_it_fails(ranks)
    assert "all ranks must take the same steps and see the same tokens" in str(ranks.fault)
    assert "rank 1" in str(fault)


def test_a_rank_that_ends_ends_the_engine() -> None:
    ranks = TwoRanks()
    ranks.bench.add("a", 4, max_new_tokens=100)
    ranks.bench.loop.step()
    ranks.hang_up()
    assert "rank 1 ended" in str(step_until_it_fails(ranks))


def test_a_rank_that_falls_silent_ends_the_engine_whoever_waits() -> None:
    told: list[Exception] = []
    ranks = TwoRanks(timeout_s=0.3)  # nobody beats here
    ranks.leader.on_loss = told.append
    wait_until(lambda: bool(told))  # the loop is not even stepping
    assert "rank 1 has given no sign of life for 0.3 s" in str(told[0])
    ranks.leader.close()


def test_a_step_that_nobody_finishes_ends_the_engine() -> None:
    told: list[Exception] = []
    ranks = TwoRanks(depth=1, timeout_s=1.0)
    ranks.leader.on_loss = told.append
    ranks.bench.add("a", 4, max_new_tokens=100)
    ranks.bench.loop.step()  # one step is in flight from here on

    def beat() -> bool:
        ranks.reports.send(beat=True)
        return bool(told)

    wait_until(beat)
    assert "no step has ended for 1 s" in str(told[0])
    ranks.leader.close()
