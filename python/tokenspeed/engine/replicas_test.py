# SPDX-License-Identifier: MIT
"""An engine of two replicas behind the face of one: where requests go, what operators see, and what a death costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.config.flags import FlagError
from tokenspeed.config.sampling import RequestError
from tokenspeed.engine.async_llm import AsyncLLM
from tokenspeed.engine.errors import EngineDeadError, OperationError
from tokenspeed.engine.kv_feed import KvBatch
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.replicas import Replicas

StartEngine = Callable[..., Engine]
PROMPT = list(range(5, 45))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
ENDLESS = {**GREEDY, "max_new_tokens": 900}
SIZES: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "num_threads": 1,
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_total_tokens": 4096,
    "block_size": 16,
    "log_level": "error",
}


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[Engine]:
    with Engine(tiny_model, data_parallel_size=2, replica_restarts=0, rl_control_port=0, **SIZES) as running:
        running.record_kv_events()
        yield running


def ask(engine: Engine, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.ports.control_port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    return json.loads(text) if text.startswith("{") else text


def num_running(engine: Engine) -> list[int]:
    return [load.num_running if load else -1 for load in engine.loads()]


def test_prompts_are_shared_out_and_answered_as_by_one_replica(engine: Engine, start_engine: StartEngine) -> None:
    prompts = [[number + 3] * 20 for number in range(6)]
    params = {"temperature": 0.9, "seed": 3, "max_new_tokens": 8, "ignore_eos": True, "n": 2, "logprobs": 1}
    before = [frontend.num_submitted for frontend in engine.frontend.replicas]
    shared = engine.generate(prompts, params)
    after = [frontend.num_submitted for frontend in engine.frontend.replicas]
    assert [new - old for new, old in zip(after, before)] == [6, 6]
    alone = start_engine().generate(prompts, params)
    assert [output.choices for output in shared] == [output.choices for output in alone]


def test_a_rank_that_is_named_serves_the_request_and_keeps_its_prefix(engine: Engine) -> None:
    engine.operations.flush_cache()
    assert engine.generate([PROMPT], GREEDY, data_parallel_rank=1)[0].cached_tokens == 0
    assert engine.generate([PROMPT], GREEDY, data_parallel_rank=1)[0].cached_tokens == 39
    assert engine.generate([PROMPT], GREEDY, data_parallel_rank=0)[0].cached_tokens == 0

    async def ask_one() -> int:
        outputs = [output async for output in AsyncLLM(engine=engine).generate(PROMPT, GREEDY, data_parallel_rank=0)]
        return outputs[-1].cached_tokens

    assert asyncio.run(ask_one()) == 39


@pytest.mark.parametrize("rank", [2, -1, True, "1"])
def test_a_rank_that_is_not_there_is_refused_by_name(engine: Engine, rank: Any) -> None:
    with pytest.raises(RequestError, match="data_parallel_rank") as refused:
        engine.generate([PROMPT], GREEDY, data_parallel_rank=rank)
    assert refused.value.field == "data_parallel_rank"


def test_leaving_a_stream_frees_its_blocks_and_an_id_in_use_is_refused(engine: Engine) -> None:
    async def leave() -> None:
        stream = AsyncLLM(engine=engine).generate(PROMPT, ENDLESS, data_parallel_rank=1)
        await anext(stream)
        assert num_running(engine) == [0, 1]
        (rid,) = engine.frontend.replicas[1]._mailboxes
        job = engine.job(PROMPT, ENDLESS, 0)
        with pytest.raises(RequestError, match="in use"):
            engine.frontend.submit([replace(job.requests[0], rid=rid)], lambda deltas: None)
        await stream.aclose()

    asyncio.run(leave())
    wait_until(lambda: engine.load().active_blocks == 0)
    assert num_running(engine) == [0, 0]


def test_operators_reach_all_replicas_at_one_port(engine: Engine) -> None:
    engine.generate([PROMPT, PROMPT], GREEDY)
    rows = ask(engine, "/v1/loads")["loads"]
    assert [row["dp_rank"] for row in rows] == [0, 1] and all(row["num_reqs"] == 0 for row in rows)
    metrics = ask(engine, "/metrics")
    for rank in (0, 1):
        assert f'tokenspeed:num_requests_total{{dp_rank="{rank}",' in metrics
    assert ask(engine, "/update_weight_version", {"new_version": "next"})["success"]
    assert engine.operations.weight_version == "next"
    assert {engine.generate([PROMPT], GREEDY, data_parallel_rank=rank)[0].weight_version for rank in (0, 1)} == {"next"}
    engine.operations.pause("keep", 10)
    assert engine.operations.is_paused
    engine.operations.resume()
    assert not engine.operations.is_paused
    with pytest.raises(OperationError, match="is not one of"):
        engine.operations.pause("sleep", 10)


def test_changes_of_all_caches_are_one_numbered_row(engine: Engine) -> None:
    engine.operations.flush_cache()
    seen: list[KvBatch] = []
    engine.kv_log.subscribe(seen.append)
    for rank in (0, 1):
        engine.generate([[rank + 7] * 20], GREEDY, data_parallel_rank=rank)
    wait_until(lambda: {batch.data_rank for batch in seen} == {0, 1})
    engine.kv_log.unsubscribe(seen.append)
    numbers = [batch.sequence for batch in seen]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    content = engine.kv_log.subscribe_afresh(seen.append)
    engine.kv_log.unsubscribe(seen.append)
    assert content.blocks[1][0].token_ids == [8] * 16


def test_what_no_replica_can_have_is_told_once_by_its_flag(tiny_model: str) -> None:
    with pytest.raises(FlagError, match="--kv-events-config"):
        Engine(tiny_model, data_parallel_size=2, **SIZES, kv_events_config='{"enable_kv_cache_events": true, "x": 1}')
    with pytest.raises(ValueError, match="--kv-cache-gib"):
        Engine(tiny_model, data_parallel_size=2, **(SIZES | {"max_total_tokens": None, "kv_cache_gib": 1e-7}))


def test_a_replica_that_is_killed_ends_its_requests_once_and_the_other_serves_on(engine: Engine) -> None:
    async def run() -> list[str]:
        llm = AsyncLLM(engine=engine)

        async def one(rank: int) -> str:
            try:
                outputs = [output async for output in llm.generate(PROMPT, ENDLESS, data_parallel_rank=rank)]
                return str(outputs[-1].finish_reason)
            except EngineDeadError as error:
                return str(error)

        tasks = [asyncio.create_task(one(rank)) for rank in (0, 1, 1)]
        while num_running(engine) != [1, 2]:
            await asyncio.sleep(0.01)
        assert isinstance(engine._serving, Replicas)
        os.kill(engine._serving._replicas[1].process.pid, signal.SIGKILL)
        return await asyncio.gather(*tasks)

    survivor, *lost = asyncio.run(run())
    assert survivor == "length"
    assert all("data-parallel rank 1 ended (signal 9)" in text for text in lost), lost
    assert engine.is_alive and engine.loads()[1] is None
    assert len(engine.generate([[number + 3] * 20 for number in range(4)], GREEDY)) == 4
    with pytest.raises(EngineDeadError, match="rank 1"):
        engine.generate([PROMPT], GREEDY, data_parallel_rank=1)
    assert [row["dp_rank"] for row in ask(engine, "/v1/loads")["loads"]] == [0]
    later: list[KvBatch] = []
    assert engine.kv_log.subscribe_afresh(later.append).blocks.keys() == {0}
    engine.operations.flush_cache()
    wait_until(lambda: engine.load().active_blocks == 0)
    os.kill(engine._serving._replicas[0].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    wait_until(lambda: not engine.is_alive)
    with pytest.raises(EngineDeadError):
        engine.generate([PROMPT], GREEDY)
