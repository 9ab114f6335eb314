# SPDX-License-Identifier: MIT
"""The benchmark runs every kind of workload on a CPU, and its numbers are of what it says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.engine import KINDS, Prompts, best
from tools.bench.engine_adapters import Batch
from tools.bench.idle import between_steps_share, idle_share
from tools.bench.llama_adapter import Slots

HERE = Path(__file__).resolve().parent


class Scripted:
    """An engine that answers at once and remembers what it was asked."""

    name = "scripted"
    vocab_size = 100

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def generate(self, batch: Batch) -> list[list[int]]:
        self.batches.append(batch)
        return [[7] * count for count in batch.new_tokens]

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def test_every_kind_of_workload_runs_on_our_engine_and_start_is_timed() -> None:
    done = subprocess.run(
        [sys.executable, HERE / "engine.py", HERE / "workloads" / "tiny.json", "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    plan = json.loads((HERE / "workloads" / "tiny.json").read_text())["engines"][0]
    assert set(results) == {work["key"] for work in plan["workloads"]} | {"tiny_after"}
    assert {work["kind"] for work in plan["workloads"]} == {*KINDS, "start"}
    numbers = {name: value for by_engine in results.values() for name, value in by_engine["tokenspeed"].items()}
    assert numbers.pop("late_compiles") == 0
    # A difference of two times: on a busy machine it may be anything, on a tiny model even negative.
    assert math.isfinite(numbers.pop("decode_tokens_per_s"))
    assert len(numbers) == 8 and all(value > 0 for value in numbers.values()), numbers


def test_agents_send_all_that_was_said_before_and_share_a_beginning() -> None:
    scripted = Scripted()
    work = {"sessions": 2, "turns": 3, "shared_tokens": 10, "turn_tokens": 4, "new_tokens": 5}
    KINDS["agents"](scripted, Prompts(100, 0), work)
    first, second, third = scripted.batches
    assert [len(prompt) for prompt in third.prompts] == [10 + 3 * 4 + 2 * 5] * 2
    assert first.prompts[0][:10] == first.prompts[1][:10] and first.prompts[0] != first.prompts[1]
    for earlier, later in ((first, second), (second, third)):
        for before, after in zip(earlier.prompts, later.prompts):
            assert after[: len(before) + 5] == before + [7] * 5


def test_decode_alone_is_the_time_beyond_fresh_prompts_with_one_token() -> None:
    scripted = Scripted()
    work = {"batch": 3, "prompt_tokens": 6, "new_tokens": 9}
    KINDS["decode"](scripted, Prompts(100, 0), work)
    whole, first = scripted.batches
    assert whole.new_tokens == [9] * 3 and first.new_tokens == [1] * 3
    assert not any(prompt in whole.prompts for prompt in first.prompts)


def test_an_engine_that_stops_early_is_an_error() -> None:
    class Lazy(Scripted):
        def generate(self, batch: Batch) -> list[list[int]]:
            return [[7] for _ in batch.prompts]

    with pytest.raises(RuntimeError, match="scripted gave"):
        KINDS["decode"](Lazy(), Prompts(100, 0), {"batch": 1, "prompt_tokens": 3, "new_tokens": 4})


def test_the_median_of_rounds_is_reported() -> None:
    assert best([{"x": 1.0, "y": 5.0}, {"x": 9.0, "y": 6.0}, {"x": 2.0, "y": 7.0}]) == {"x": 2.0, "y": 6.0}


def test_idle_share_counts_what_no_interval_covers() -> None:
    assert idle_share([(0, 10, "a"), (5, 12, "b"), (16, 20, "a")]) == pytest.approx(0.2)


def test_idleness_between_steps_is_what_lies_before_a_steps_first_kernel() -> None:
    step = [("first", 0, 4), ("second", 5, 10)]
    events = [(begin + at, end + at, name) for at in (0, 20) for name, begin, end in step]
    events.insert(2, (13, 14, "Memcpy DtoH"))
    assert between_steps_share(events, "first") == pytest.approx((3 + 6) / 30)


def test_workload_files_name_shapes_that_exist() -> None:
    for path in (HERE / "workloads").glob("*.json"):
        for plan in json.loads(path.read_text())["engines"]:
            assert "gguf" in plan["options"] or (HERE / "shapes" / plan["shape"] / "config.json").exists()
            assert all(work["kind"] in {*KINDS, "start"} for work in plan["workloads"])


def run_step(slots: Slots, most: int, token: int) -> list[tuple[int, int, int]]:
    """A step whose every complete slot draws `token`, as the adapter takes it."""
    pieces = slots.step(most)
    for index, _, end in pieces:
        slot = slots.slots[index]
        slot.computed = end
        if end == len(slot.tokens):
            slot.tokens.append(token)
            slot.due -= 1
            slot.request = slot.request if slot.due else None
    return pieces


def test_slots_put_decodes_first_and_cut_prompts_at_a_step() -> None:
    slots = Slots(2)
    assert slots.place(0, [1, 2], 3) == 0
    assert run_step(slots, 4, 7) == [(0, 0, 2)]
    assert slots.place(1, list(range(10, 16)), 1) == 1
    assert slots.place(2, [5], 1) is None, "both are taken"
    assert run_step(slots, 4, 7) == [(0, 2, 3), (1, 0, 3)]
    assert run_step(slots, 4, 7) == [(0, 3, 4), (1, 3, 6)]
    assert not slots.busy


def test_a_later_turn_goes_to_its_slot_and_computes_only_what_is_new() -> None:
    slots = Slots(2)
    for request, prompt in enumerate(([1, 2, 3], [8, 9])):
        slots.place(request, prompt, 2)
    while slots.busy:
        run_step(slots, 100, 7)
    # The last token drawn was never computed.
    assert slots.place(2, [8, 9, 7, 7, 4], 1) == 1
    assert run_step(slots, 100, 7) == [(1, 3, 5)]
    assert slots.place(3, [1, 2, 3], 1) == 0
    assert run_step(slots, 100, 7) == [(0, 2, 3)], "logits need one token at least"
