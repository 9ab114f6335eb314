# SPDX-License-Identifier: MIT
"""Replicas that are killed come back beside the others, as the others are; or stay away, and it is said why."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.config.flags import FlagError
from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.replicas import Replica, Replicas
from tokenspeed.engine.replicas_test import ENDLESS, GREEDY, PROMPT, SIZES

StartReplicas = Callable[..., Engine]


@pytest.fixture
def start(tiny_model: str) -> Iterator[StartReplicas]:
    engines: list[Engine] = []

    def started(**options: Any) -> Engine:
        engines.append(Engine(tiny_model, data_parallel_size=2, **(SIZES | options)))
        return engines[-1]

    yield started
    for engine in engines:
        engine.shutdown()


def replica(engine: Engine, rank: int) -> Replica:
    assert isinstance(engine._serving, Replicas)
    return engine._serving._replicas[rank]


def kill(engine: Engine, rank: int) -> Replica:
    lost = replica(engine, rank)
    os.kill(lost.process.pid, signal.SIGKILL)
    wait_until(lambda: not lost.is_alive)
    return lost


def serves(engine: Engine, rank: int) -> bool:
    return engine.loads()[rank] is not None


def test_a_replica_that_is_killed_serves_again_and_its_requests_end(start: StartReplicas) -> None:
    engine = start()
    engine.record_kv_events()
    expected = engine.generate([PROMPT], GREEDY, data_parallel_rank=1)[0].token_ids
    ended: list[Any] = []
    job = engine.job(PROMPT, ENDLESS, 1)
    engine.frontend.submit(job.requests, ended.append)
    wait_until(lambda: any(isinstance(part, list) for part in ended))
    lost = kill(engine, 1)
    wait_until(lambda: isinstance(ended[-1], EngineDeadError))
    assert "rank 1 ended (signal 9)" in str(ended[-1])
    assert engine.is_alive and engine.generate([PROMPT], GREEDY)[0].token_ids == expected
    wait_until(lambda: serves(engine, 1))
    assert replica(engine, 1) is not lost
    again = engine.generate([PROMPT], GREEDY, data_parallel_rank=1)[0]
    assert (again.token_ids, again.cached_tokens) == (expected, 0)
    content = engine.kv_log.subscribe_afresh(lambda _: None).blocks
    wait_until(lambda: 1 in engine.kv_log.subscribe_afresh(lambda _: None).blocks)
    assert 0 in content
    kill(engine, 1)  # and again
    wait_until(lambda: serves(engine, 1))
    assert engine.generate([PROMPT], GREEDY, data_parallel_rank=1)[0].token_ids == expected


def test_an_engine_whose_replicas_are_all_killed_comes_back(start: StartReplicas) -> None:
    engine = start()
    for rank in (0, 1):
        kill(engine, rank)
    with pytest.raises(EngineDeadError):
        engine.generate([PROMPT], GREEDY)
    assert engine.is_alive
    wait_until(lambda: serves(engine, 0) and serves(engine, 1))
    assert len(engine.generate([PROMPT] * 4, GREEDY)) == 4


def test_one_that_comes_back_among_paused_ones_is_paused(start: StartReplicas) -> None:
    engine = start()
    engine.operations.pause("keep", 10)
    kill(engine, 1)
    wait_until(lambda: serves(engine, 1))
    assert replica(engine, 1).state.is_paused
    engine.operations.resume()
    assert len(engine.generate([PROMPT], GREEDY, data_parallel_rank=1)[0].token_ids) == 12


def test_one_whose_weights_would_be_older_stays_away(start: StartReplicas, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(replica_restarts=1)
    engine.operations.updates.rename("newer")
    with caplog.at_level(logging.WARNING):
        kill(engine, 1)
        wait_until(lambda: "not started again (--replica-restarts)" in caplog.text)
    assert "the others have other weights" in caplog.text
    assert not serves(engine, 1) and engine.generate([PROMPT], GREEDY)[0].weight_version == "newer"


def test_an_engine_can_be_stopped_while_one_comes_back(start: StartReplicas) -> None:
    engine = start()
    lost = kill(engine, 1)
    assert isinstance(engine._serving, Replicas)
    revival = engine._serving._revival
    wait_until(lambda: revival._starting or replica(engine, 1) is not lost)
    engine.shutdown()
    assert not revival.is_due and not revival._starting


def test_none_is_started_again_where_nobody_wants_it(start: StartReplicas) -> None:
    engine = start(replica_restarts=0)
    kill(engine, 0)
    kill(engine, 1)
    wait_until(lambda: not engine.is_alive)
    with pytest.raises(FlagError, match="--replica-restarts"):
        start(replica_restarts=-1)
