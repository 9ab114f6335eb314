# SPDX-License-Identifier: MIT
"""Runs a workload file through our offline `Engine` and, by adapters, through others; one key a workload.

A file names engines to start (a shape of `shapes/` and options) and, for each, workloads of token ids. Weights are
random at real shapes, prompts are given as ids, decoding is greedy and runs to the last token asked for. Kinds:
"decode": a batch from prompt to last token; with prefill, and decode alone, which is the time of the whole batch less
that of fresh prompts with one new token each. "first_token": the same with one new token, in milliseconds. "prefill":
prompt tokens per second. "agents": sessions that take turns in lockstep, each turn's prompt all that was said before;
the time of all turns, of the second and of the last. "uniform": requests of random lengths. "start": a new
process to ready, with an empty compile cache and with a full one.

`python3 tools/bench/engine.py tools/bench/workloads/h200.json --engine tokenspeed --engine vllm --json`
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.engine_adapters import ADAPTERS, Adapter, Batch

HERE = Path(__file__).resolve().parent
Numbers = dict[str, float]


class Prompts:
    """Random token ids, never the same twice, so that no prefix cache knows them."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def ids(self, length: int) -> list[int]:
        return self._random.integers(10, self._vocab_size - 10, length).tolist()

    def batch(self, count: int, length: int, new_tokens: int) -> Batch:
        return Batch([self.ids(length) for _ in range(count)], [new_tokens] * count)

    def uniform(self, count: int, low: int, high: int) -> Batch:
        lengths, news = self._random.integers(low, high + 1, (2, count)).tolist()
        return Batch([self.ids(length) for length in lengths], news)


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def timed(adapter: Adapter, batch: Batch, work: Mapping[str, Any]) -> tuple[float, list[list[int]]]:
    """Seconds by the workload's "clock": "wall", or "cpu", the processor time of all threads of this process, which
    others on the machine hardly change."""
    clock = CLOCKS[work.get("clock", "wall")]
    started = clock()
    outputs = adapter.generate(batch)
    elapsed_s = clock() - started
    if [len(output) for output in outputs] != batch.new_tokens:
        raise RuntimeError(f"{adapter.name} gave {[len(output) for output in outputs]} of {batch.new_tokens} tokens")
    return elapsed_s, outputs


def decode(adapter: Adapter, prompts: Prompts, work: Mapping[str, Any]) -> Numbers:
    count, length, new = work["batch"], work["prompt_tokens"], work["new_tokens"]
    whole_s, _ = timed(adapter, prompts.batch(count, length, new), work)
    first_s, _ = timed(adapter, prompts.batch(count, length, 1), work)
    return {
        "tokens_per_s": count * new / whole_s,
        "decode_tokens_per_s": count * (new - 1) / (whole_s - first_s),
    }


def first_token(adapter: Adapter, prompts: Prompts, work: Mapping[str, Any]) -> Numbers:
    elapsed_s, _ = timed(adapter, prompts.batch(work["batch"], work["prompt_tokens"], 1), work)
    return {"first_token_ms": elapsed_s * 1e3}


def prefill(adapter: Adapter, prompts: Prompts, work: Mapping[str, Any]) -> Numbers:
    count, length = work["batch"], work["prompt_tokens"]
    elapsed_s, _ = timed(adapter, prompts.batch(count, length, 1), work)
    return {"prefill_tokens_per_s": count * length / elapsed_s}


def agents(adapter: Adapter, prompts: Prompts, work: Mapping[str, Any]) -> Numbers:
    shared = prompts.ids(work["shared_tokens"])
    histories = [list(shared) for _ in range(work["sessions"])]
    turns_s: list[float] = []
    for _ in range(work["turns"]):
        for history in histories:
            history += prompts.ids(work["turn_tokens"])
        batch = Batch([list(h) for h in histories], [work["new_tokens"]] * len(histories))
        elapsed_s, outputs = timed(adapter, batch, work)
        turns_s.append(elapsed_s)
        for history, output in zip(histories, outputs):
            history += output
    # The last turn's prompt is the longest by far; it costs no more where only new tokens are computed.
    return {"total_s": sum(turns_s), "second_turn_ms": turns_s[1] * 1e3, "last_turn_ms": turns_s[-1] * 1e3}


def uniform(adapter: Adapter, prompts: Prompts, work: Mapping[str, Any]) -> Numbers:
    batch = prompts.uniform(work["batch"], work["low"], work["high"])
    elapsed_s, _ = timed(adapter, batch, work)
    return {"tokens_per_s": sum(batch.new_tokens) / elapsed_s}


KINDS: dict[str, Callable[[Adapter, Prompts, Mapping[str, Any]], Numbers]] = {
    "decode": decode,
    "first_token": first_token,
    "prefill": prefill,
    "agents": agents,
    "uniform": uniform,
}


def best(rounds: list[Numbers]) -> Numbers:
    """The median of each number."""
    return {key: float(np.median([numbers[key] for numbers in rounds])) for key in rounds[0]}


def run_engine(name: str, plan: Mapping[str, Any], wanted: set[str], device: str | None) -> dict[str, Numbers]:
    """Every workload of one engine of the file on one adapter; the first round of each warms up and is dropped."""
    works = [work for work in plan["workloads"] if not wanted or work["key"] in wanted]
    results: dict[str, Numbers] = {}
    live = [work for work in works if work["kind"] != "start"]
    if live:
        adapter = ADAPTERS[name](HERE / "shapes" / plan["shape"], plan["options"], device)
        prompts = Prompts(adapter.vocab_size, seed=plan.get("seed", 0))
        try:
            for work in live:
                measure = KINDS[work["kind"]]
                rounds = [measure(adapter, prompts, work) for _ in range(work.get("rounds", 2) + 1)]
                results[work["key"]] = best(rounds[1:])
                print(f"{name:12} {work['key']:28} {_text(results[work['key']])}", file=sys.stderr, flush=True)
        finally:
            results[f"{plan['shape']}_after"] = adapter.counters()
            adapter.close()
            del adapter
            gc.collect()
    for work in works:
        if work["kind"] == "start":
            results[work["key"]] = start(name, plan, device)
            print(f"{name:12} {work['key']:28} {_text(results[work['key']])}", file=sys.stderr, flush=True)
    return results


def start(name: str, plan: Mapping[str, Any], device: str | None) -> Numbers:
    """Seconds from the start of a process to an engine that is ready, twice over one compile cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "VLLM_CACHE_ROOT": cache}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, __file__, "--start-only", name, json.dumps(plan), *([device] if device else [])]
        times = []
        for _ in range(2):
            started = time.perf_counter()
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - started)
    return {"cold_s": times[0], "warm_s": times[1]}


def start_only(name: str, plan: Mapping[str, Any], device: str | None) -> None:
    """The process that `start` times: ends, without tidying up, when the engine is ready."""
    ADAPTERS[name](HERE / "shapes" / plan["shape"], plan["options"], device)
    sys.stdout.flush()
    os._exit(0)


def _text(numbers: Numbers) -> str:
    return "  ".join(f"{key} {value:,.1f}" for key, value in numbers.items())


def main() -> None:
    if sys.argv[1:2] == ["--start-only"]:
        start_only(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", type=Path)
    parser.add_argument("--engine", action="append", choices=sorted(ADAPTERS), help="default: tokenspeed")
    parser.add_argument("--only", action="append", default=[], help="a workload's key; may be given again")
    parser.add_argument("--device", help="where the file does not say: cpu or cuda")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Numbers]] = {}
    for plan in json.loads(arguments.workloads.read_text())["engines"]:
        if arguments.only and not any(work["key"] in arguments.only for work in plan["workloads"]):
            continue
        for name in arguments.engine or ["tokenspeed"]:
            for key, numbers in run_engine(name, plan, set(arguments.only), arguments.device).items():
                results.setdefault(key, {})[name] = numbers
    if arguments.json:
        print(json.dumps(results))
        return
    for key, by_engine in results.items():
        for name, numbers in by_engine.items():
            print(f"{key:28} {name:12} {_text(numbers)}")


if __name__ == "__main__":
    main()
