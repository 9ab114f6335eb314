# SPDX-License-Identifier: MIT
"""Engines whose device pool is too small for their sessions: what it lost comes back from the host, to the bit."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

import tokenspeed_cc
from tokenspeed.config.flags import FlagError
from tokenspeed.engine.errors import OutOfMemory
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.testing import CONFIG, LATENT_CONFIG, StartEngine
from tokenspeed.kvstore import Copier

WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
LARGE = {"max_total_tokens": 8192}
SMALL = {"max_total_tokens": 320}
"""Twenty blocks: three sessions of a hundred tokens."""
TIERED = {**SMALL, "kvstore_ratio": 8.0}
DRAWN = {"temperature": 1.1, "seed": 5, "max_new_tokens": 10, "ignore_eos": True, "logprobs": 2}
SESSIONS = [[(7 * step * (session + 2) + session) % 317 + 3 for step in range(100)] for session in range(7)]
WHOLE_BLOCKS = 96


def turn(engine: Engine, prompts: Sequence[list[int]]) -> list[Any]:
    """One session after the other; tokens with their log-probabilities."""
    outputs = [engine.generate([prompt], DRAWN)[0] for prompt in prompts]
    return [(output.token_ids, output.logprobs) for output in outputs]


def cached(engine: Engine, prompts: Sequence[list[int]]) -> list[int]:
    return [engine.generate([prompt], DRAWN)[0].cached_tokens for prompt in prompts]


def metric(engine: Engine, name: str, label: str) -> float:
    """A series of the engine's; label: the value of its own label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.ports.metrics_port}/metrics", timeout=10) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return next(s.value for s in samples if s.name == f"tokenspeed:{name}" and label in s.labels.values())


def settled(engine: Engine) -> tokenspeed_cc.Load:
    """The scheduler's load once no request and no copy is under way, its invariants checked."""
    core = core_of(engine)
    deadline = time.monotonic() + 60

    def look() -> tokenspeed_cc.Load | None:
        loop = core.loop
        if loop.tier.is_busy or loop.scheduler.has_work():
            return None
        loop.scheduler.check()
        return loop.scheduler.load()

    while (load := core.operations.calls.call(look)) is None:
        assert time.monotonic() < deadline
    return load


def core_of(engine: Engine) -> Any:
    assert engine._core is not None
    return engine._core


class Gate:
    """A copier that waits to be opened, or fails; for one direction."""

    def __init__(self, engine: Engine, to_host: bool, fails: bool) -> None:
        self._carrier = core_of(engine).tier.carrier
        self._behind: Copier = self._carrier.copier
        self._to_host, self._fails = to_host, fails
        self.reached, self.open = threading.Event(), threading.Event()
        self._carrier.copier = self

    def copy(self, pairs: NDArray[np.int32], to_host: bool) -> None:
        if to_host == self._to_host:
            if self._fails:
                raise RuntimeError("the bus is on fire")
            self.reached.set()
            assert self.open.wait(60)
        self._behind.copy(pairs, to_host)

    def remove(self) -> None:
        self.open.set()
        self._carrier.copier = self._behind


@pytest.mark.parametrize("depth", [0, 1])
def test_second_turns_come_from_the_host_to_the_bit(start_engine: StartEngine, depth: int) -> None:
    alone, tiered = start_engine(**LARGE), start_engine(**TIERED, overlap_depth=depth, metrics_port=0)
    for prompts in (SESSIONS, [[*session, *range(3, 20)] for session in SESSIONS]):
        assert turn(tiered, prompts) == turn(alone, prompts)
    assert cached(tiered, SESSIONS) == [WHOLE_BLOCKS] * len(SESSIONS)
    load = settled(tiered)
    assert load.active_blocks == 0 and load.host_reserved_blocks == 0
    assert load.host_cached_blocks + load.host_free_blocks == 8 * 20
    assert metric(tiered, "prompt_tokens_by_source_total", "host_hit") == 2 * WHOLE_BLOCKS * len(SESSIONS)
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    assert metric(tiered, "kv_moved_bytes_total", "to_device") == 2 * 6 * len(SESSIONS) * block_bytes
    assert metric(tiered, "kv_moved_bytes_total", "to_host") == load.host_cached_blocks * block_bytes
    assert metric(tiered, "kv_host_blocks", "cached") == load.host_cached_blocks
    assert metric(tiered, "kv_transfer_failures_total", "to_host") == 0


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (CONFIG | WINDOWED, {}),
        (CONFIG, {"kv_cache_dtype": "fp8_e4m3", "kv_cache_quant_method": "per_token_head"}),
        (LATENT_CONFIG, {}),
        (LATENT_CONFIG, {"kv_cache_dtype": "fp8_e4m3"}),
    ],
    ids=["sliding window", "fp8 with scales", "latents", "fp8 latents"],
)
def test_every_kind_of_cache_comes_back(
    start_engine: StartEngine, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changes))
    alone, tiered = (start_engine(model=str(tmp_path), **size, **options) for size in (LARGE, TIERED))
    prompts = SESSIONS[:5]
    expected = turn(alone, prompts)
    assert turn(tiered, prompts) == expected
    assert turn(tiered, prompts) == expected
    assert cached(tiered, prompts) == [WHOLE_BLOCKS] * len(prompts)


@pytest.mark.parametrize("host", [{"kvstore_ratio": 4.0}, {"kvstore_ratio": 0.2}], ids=["with room", "a full tier"])
def test_who_is_driven_out_goes_on_as_if_nothing_had_been(start_engine: StartEngine, host: dict[str, float]) -> None:
    params = [{**DRAWN, "seed": seed, "max_new_tokens": 90} for seed in range(8)]
    prompts = [session[:40] for session in SESSIONS] + [[5] * 40]
    expected = start_engine(**LARGE).generate(prompts, params)
    tiered = start_engine(**SMALL, **host)
    found = tiered.generate(prompts, params)
    assert [(o.token_ids, o.logprobs) for o in found] == [(o.token_ids, o.logprobs) for o in expected]
    scheduler = core_of(tiered).loop.scheduler
    assert sum(scheduler.stats(request).num_retractions for request in range(1, 200) if knows(scheduler, request)) > 0
    assert settled(tiered).active_blocks == 0


def knows(scheduler: tokenspeed_cc.Scheduler, request: int) -> bool:
    try:
        scheduler.stats(request)
    except ValueError:
        return False
    return True


def test_ranks_keep_their_parts_and_settle_alike(start_engine: StartEngine) -> None:
    alone, both = start_engine(**LARGE), start_engine(**TIERED, tensor_parallel_size=2)
    expected = [tokens for tokens, _ in turn(alone, SESSIONS)]
    assert [tokens for tokens, _ in turn(both, SESSIONS)] == expected
    assert cached(both, SESSIONS) == [WHOLE_BLOCKS] * len(SESSIONS)
    gate = Gate(both, to_host=False, fails=True)  # on the first rank alone
    assert [tokens for tokens, _ in turn(both, SESSIONS)] == expected
    gate.remove()
    core_of(both).operations.flush_cache()
    assert cached(both, SESSIONS[:2]) == [0, 0]


@pytest.mark.parametrize("to_host", [True, False])
def test_a_copy_that_fails_costs_hits_and_nothing_else(start_engine: StartEngine, to_host: bool) -> None:
    expected = turn(start_engine(**LARGE), SESSIONS)
    tiered = start_engine(**TIERED, metrics_port=0)
    gate = Gate(tiered, to_host, fails=True)
    for _ in range(2):
        assert turn(tiered, SESSIONS) == expected
    assert metric(tiered, "kv_transfer_failures_total", "to_host" if to_host else "to_device") > 0
    assert metric(tiered, "prompt_tokens_by_source_total", "host_hit") == 0
    assert settled(tiered).active_blocks == 0
    gate.remove()
    turn(tiered, SESSIONS)
    assert cached(tiered, SESSIONS) == [WHOLE_BLOCKS] * len(SESSIONS)


def test_an_abort_amid_a_load_returns_its_blocks_and_ends_once(start_engine: StartEngine) -> None:
    tiered = start_engine(**TIERED)
    expected = turn(tiered, SESSIONS)
    gate = Gate(tiered, to_host=False, fails=False)
    ends: list[str] = []

    def take(deltas: Any) -> None:
        ends.extend(delta.finish for delta in deltas if delta.finish)

    job = tiered.job(SESSIONS[0], DRAWN)
    tiered.frontend.submit(job.requests, take)
    assert gate.reached.wait(60)
    assert core_of(tiered).operations.abort(job.requests[0].rid) == 1
    assert turn(tiered, [[9] * 8])  # others are served meanwhile
    assert core_of(tiered).loop.scheduler.load().active_blocks >= WHOLE_BLOCKS // 16
    gate.remove()
    assert settled(tiered).active_blocks == 0
    assert ends == ["abort"]
    assert turn(tiered, SESSIONS[:1]) == expected[:1]


def test_aborts_at_random_points_leave_no_block_held_and_every_request_ends_once(start_engine: StartEngine) -> None:
    tiered = start_engine(**TIERED)
    expected = turn(tiered, SESSIONS)
    ends: Counter[str] = Counter()

    def take(deltas: Any) -> None:
        ends.update(delta.rid for delta in deltas if delta.finish)

    random, rids = Random(7), list[str]()
    for number in range(60):
        job = tiered.job([*SESSIONS[number % 7], *range(3, 3 + number % 5)], DRAWN)
        rids.append(job.requests[0].rid)
        tiered.frontend.submit(job.requests, take)
        if random.random() < 0.7:
            core_of(tiered).operations.abort(rids[random.randrange(len(rids))])
    load = settled(tiered)
    assert (load.active_blocks, load.host_reserved_blocks) == (0, 0)
    assert ends == Counter(rids)
    assert turn(tiered, SESSIONS) == expected


def test_flushing_waits_for_what_is_being_stored_and_new_weights_find_nothing(start_engine: StartEngine) -> None:
    tiered = start_engine(**TIERED)
    operations = core_of(tiered).operations
    turn(tiered, SESSIONS)
    gate = Gate(tiered, to_host=True, fails=False)
    turn(tiered, [[7] * 50])
    assert gate.reached.wait(60)
    threading.Timer(0.05, gate.remove).start()
    operations.flush_cache()
    assert settled(tiered).host_cached_blocks == 0
    assert cached(tiered, SESSIONS) == [0] * len(SESSIONS)
    operations.updates.rename("v2")
    assert settled(tiered).host_cached_blocks == 0
    assert cached(tiered, SESSIONS) == [0] * len(SESSIONS)


def test_kv_events_tell_of_the_host_by_its_name(start_engine: StartEngine) -> None:
    tiered = start_engine(**TIERED)
    core, changes = core_of(tiered), list[Any]()
    core.kv_feed.subscribe(lambda batch: changes.extend(batch.changes))
    core.operations.calls.call(core.kv_feed.enable)
    turn(tiered, SESSIONS[:2])
    settled(tiered)
    stored = {m: [c.block_hash for c in changes if c.medium == m] for m in ("device", "host")}
    assert len(stored["host"]) == 12 and set(stored["host"]) == set(stored["device"])


def test_what_cannot_be_had_is_refused_by_the_flag(start_engine: StartEngine) -> None:
    with pytest.raises(OutOfMemory, match=r"^--kvstore-size: 1e-06 GB has no room for a KV block \(0\.0 MiB\)$"):
        start_engine(**SMALL, kvstore_size=1e-6)
    with pytest.raises(OutOfMemory, match=r"^--kvstore-ratio: 900000 times the device's pool is .* GiB of host memory"):
        start_engine(**LARGE, kvstore_ratio=900_000.0)
    with pytest.raises(FlagError, match="--kvstore-ratio: the host tier keeps cached prefixes"):
        start_engine(**TIERED, enable_prefix_caching=False)
    assert core_of(start_engine(**TIERED, disable_kvstore=True)).tier is None
