# SPDX-License-Identifier: MIT
"""µs per plan and per advance, through the binding, on one core.

    bazel run //tools/bench:scheduler -- [--json] [--scenario REGEX] [--adapter module:Class]... [--clock wall|cpu]

Scenarios: N decodes at a context, one cold 8k chunk, running requests with a long queue behind them, a drain of
10,000 requests over 50 shared prefixes, and eviction in every step; and what a queued request takes in memory. Several
--adapter are timed side by side, scenario by scenario; by default ours alone. --json prints one object, a key a
scenario: {scenario: {plan_us_p50, plan_us_p99, advance_us_p50, advance_us_p99, step_us_p50, requests_per_s, steps}};
with several adapters one such object under the name of each. requests_per_s counts the requests that ended in the
measured steps, per second of planning and advancing; a drain's includes submitting them. On a machine that others
use, --clock cpu counts the time of this thread alone.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.bench.scheduler_adapters import Adapter, Setup

Numbers = dict[str, float]
BLOCK = 64
CHUNK = 8192
MEASURED_STEPS = 400
OUR_ADAPTER = "tools.bench.scheduler_adapters:TokenSpeed"
# A scenario stops after this much measured time, so that a slow scheduler can be compared at all.
MAX_MEASURED_S = 6.0
CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}


def percentile(samples: list[float], q: float) -> float:
    return round(float(np.percentile(np.array(samples), q)), 2)


def tokens(family: int, count: int) -> NDArray[np.int32]:
    return np.random.default_rng(family).integers(10, 100_000, count, dtype=np.int32)


def warm_steps(num_seqs: int, context: int) -> int:
    """Steps until every prompt is in, with all other requests decoding beside."""
    return -(-num_seqs * context // (CHUNK - num_seqs)) + 16


def setup_for(num_seqs: int, context: int) -> Setup:
    max_model_len = context + warm_steps(num_seqs, context) + MEASURED_STEPS + 8
    num_blocks = num_seqs * (-(-max_model_len // BLOCK) + 2) + 64
    return Setup(num_blocks, BLOCK, num_seqs, max_model_len, CHUNK)


class Watch:
    """Times steps of one adapter."""

    now = CLOCKS["wall"]  # ns; set once from the command line

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.plan_us: list[float] = []
        self.advance_us: list[float] = []
        self.ended = 0

    def step(self) -> None:
        start = Watch.now()
        plan = self.adapter.plan()
        middle = Watch.now()
        if not plan:
            raise RuntimeError(f"nothing can be planned after {len(self.plan_us)} steps and {self.ended} requests")
        self.ended += self.adapter.advance(plan)
        end = Watch.now()
        self.plan_us.append((middle - start) / 1e3)
        self.advance_us.append((end - middle) / 1e3)

    def numbers(self) -> Numbers:
        both_us = [plan + advance for plan, advance in zip(self.plan_us, self.advance_us)]
        return {
            "plan_us_p50": percentile(self.plan_us, 50),
            "plan_us_p99": percentile(self.plan_us, 99),
            "advance_us_p50": percentile(self.advance_us, 50),
            "advance_us_p99": percentile(self.advance_us, 99),
            "step_us_p50": percentile(both_us, 50),
            "requests_per_s": round(self.ended / sum(both_us) * 1e6, 1),
            "steps": len(both_us),
        }


def measure(adapter: Adapter, num_steps: int) -> Numbers:
    watch = Watch(adapter)
    deadline = time.perf_counter() + MAX_MEASURED_S
    while len(watch.plan_us) < num_steps and time.perf_counter() < deadline:
        watch.step()
    return watch.numbers()


def start_decodes(adapter: Adapter, count: int, context: int) -> None:
    """Submits `count` requests with distinct prompts and steps until all of them decode."""
    warm = warm_steps(count, context)
    for i in range(count):
        adapter.submit(i, tokens(i, context), warm + MEASURED_STEPS + 8)
    for _ in range(warm):
        adapter.advance(adapter.plan())


def decode(make: Callable[[Setup], Adapter], count: int, context: int) -> Numbers:
    adapter = make(setup_for(count, context))
    start_decodes(adapter, count, context)
    return measure(adapter, MEASURED_STEPS)


def cold_chunk(make: Callable[[Setup], Adapter]) -> Numbers:
    adapter = make(setup_for(8, 64 * CHUNK))
    adapter.submit(0, tokens(0, 64 * CHUNK), 1)
    return measure(adapter, 60)


def queued(make: Callable[[Setup], Adapter], behind: int) -> Numbers:
    adapter = make(setup_for(256, 1024))
    start_decodes(adapter, 256, 1024)
    for i in range(behind):
        adapter.submit(1000 + i, tokens(1000 + i, 512), 100)
    return measure(adapter, MEASURED_STEPS)


def drain(make: Callable[[Setup], Adapter]) -> Numbers:
    num_requests, num_prefixes = 10_000, 50
    adapter = make(Setup(16_384, BLOCK, 256, 4096, CHUNK))
    prefixes = [tokens(i, 1024) for i in range(num_prefixes)]
    prompts = [np.concatenate([prefixes[i % num_prefixes], tokens(10_000 + i, 64)]) for i in range(num_requests)]
    deadline = time.perf_counter() + 5 * MAX_MEASURED_S
    start = Watch.now()
    for i, prompt in enumerate(prompts):
        adapter.submit(i, prompt, 8)
    watch = Watch(adapter)
    while watch.ended < num_requests and time.perf_counter() < deadline:
        watch.step()
    seconds = (Watch.now() - start) / 1e9
    return {**watch.numbers(), "requests_per_s": round(watch.ended / seconds, 1), "requests": watch.ended}


def evict(make: Callable[[Setup], Adapter]) -> Numbers:
    """A pool full of cached blocks, and in each step one request whose prompt evicts some of them."""
    adapter = make(Setup(4096, BLOCK, 8, 4096, CHUNK))
    for i in range(800):
        adapter.submit(i, tokens(i, 2048), 1)
    for _ in range(70):
        adapter.advance(adapter.plan())
    return measure(adapter, 100)


def queue_memory(path: str) -> Numbers:
    """Resident bytes a queued request takes beyond its prompt's four bytes a token, seen by a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(fill_queue, (path,))


def fill_queue(path: str) -> Numbers:
    num_requests, length = 20_000, 1024
    adapter = load_adapter(path)(setup_for(8, 2048))
    before = resident_bytes()
    prompt = tokens(1, length)
    for i in range(num_requests):
        adapter.submit(i, prompt, 100)
    each = (resident_bytes() - before) / num_requests
    return {"bytes_beyond_prompt": round(each - 4 * length, 1), "prompt_bytes": 4 * length}


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def scenarios() -> dict[str, Callable[[Callable[[Setup], Adapter]], Numbers]]:
    table: dict[str, Callable[[Callable[[Setup], Adapter]], Numbers]] = {}
    for count in (32, 256, 1024):
        for name, context in (("1k", 1024), ("8k", 8192), ("32k", 32_768)):
            table[f"decode_{count}_{name}"] = partial(decode, count=count, context=context)
    table["cold_chunk_8k"] = cold_chunk
    for behind in (0, 100, 1000, 10_000):
        table[f"queued_{behind}"] = partial(queued, behind=behind)
    table["drain_10000"] = drain
    table["evict_every_step"] = evict
    return table


def load_adapter(path: str) -> Callable[[Setup], Adapter]:
    module, _, name = path.partition(":")
    if not name:
        raise SystemExit(f"--adapter {path}: expected module:Class")
    made: Callable[[Setup], Adapter] = getattr(importlib.import_module(module), name)
    return made


def run_on(scenario: Callable[[Callable[[Setup], Adapter]], Numbers], path: str) -> Numbers:
    return scenario(load_adapter(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--scenario", default="", help="regular expression of the scenarios to run")
    parser.add_argument("--adapter", action="append", help=f"module:Class, repeatable; default {OUR_ADAPTER}")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    Watch.now = CLOCKS[args.clock]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    paths = args.adapter or [OUR_ADAPTER]
    results: dict[str, dict[str, Any]] = {path: {} for path in paths}
    runs: dict[str, Callable[[str], Numbers]] = {"queue_memory": queue_memory}
    for name, scenario in scenarios().items():
        runs[name] = partial(run_on, scenario)
    for name, run in runs.items():
        for path in paths if re.search(args.scenario, name) else []:
            numbers = results[path][name] = run(path)
            if not args.json:
                shown = "  ".join(f"{key} {value:g}" for key, value in numbers.items())
                print(f"{path.rpartition(':')[2]:20} {name:18} {shown}", flush=True)
    if args.json:
        json.dump(results if len(results) > 1 else next(iter(results.values())), sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
