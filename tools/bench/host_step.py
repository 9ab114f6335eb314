# SPDX-License-Identifier: MIT
"""What the host does for one decode step, part by part, when the device's work takes no time.

The engine's own loop, scheduler, sampler, captured steps and lane frontend, on the CPU; only what a graph would play is
nothing, and the lane's bytes go nowhere. While a GPU computes a step, the host has that long for all of this.

`python3 tools/bench/host_step.py [--rows 1 64 256] [--steps N] [--json]` prints, per number of rows, medians in
microseconds of the wall clock: {rows: {part: us}}. Parts: plan (scheduler), launch (what the device reads of the plan,
the sampler's preparation, the queueing), device (the step's tokens to the plan's rows), settle (the scheduler's
advance, the rows' columns, metrics), publish (columns to the lane's message, its bytes), step (all of it, and what is
in none of these parts).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import tokenspeed_cc
from tokenspeed.config.resolve import AdmissionConfig, GrammarConfig, LogConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.admission import Admission
from tokenspeed.engine.device_state import DeviceState
from tokenspeed.engine.executor import StepTokens, to_host
from tokenspeed.engine.graphs import DecodeGraphs, DecodeOutput, RepeatingSteps
from tokenspeed.engine.lane_frontend import to_batch
from tokenspeed.engine.loop import EngineLoop
from tokenspeed.engine.messages import Add, Command, StepOutput
from tokenspeed.engine.records import RequestTable
from tokenspeed.engine.runner import Captured, ModelRunner, Sampled, StepWork
from tokenspeed.engine.step_log import StepLog
from tokenspeed.engine.step_metrics import StepMetrics
from tokenspeed.grammar import GrammarCompiler
from tokenspeed.observability.engine_metrics import EngineMetrics
from tokenspeed.rpc.lane import wire
from tokenspeed.sampling import Sampler, SamplerConfig

VOCABULARY, BLOCK, PROMPT, MAX_ROWS = 32_000, 64, 200, 256
_WARM_STEPS = 40
Numbers = dict[str, float]


class Parts:
    """Seconds of the parts of the steps that were watched."""

    def __init__(self) -> None:
        self.by_part: dict[str, list[float]] = {}

    def add(self, part: str, seconds: float) -> None:
        self.by_part.setdefault(part, []).append(seconds)

    def medians_us(self) -> Numbers:
        return {part: round(statistics.median(seen) * 1e6, 1) for part, seen in self.by_part.items()}


class WatchedLog(StepLog):
    """Tells `parts` what the loop tells its log."""

    parts = Parts()

    def took(self, part: str, since_s: float) -> float:
        self.parts.add(part, time.perf_counter() - since_s)
        return super().took(part, since_s)


class Desk:
    """A lane frontend whose bytes go nowhere."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.parts = Parts()

    def drain(self, timeout_s: float) -> list[Command]:
        taken, self.commands = self.commands, []
        return taken

    def publish(self, output: StepOutput) -> None:
        begun_s = time.perf_counter()
        wire.encode(to_batch(output, 0))
        self.parts.add("publish", time.perf_counter() - begun_s)


class NothingToPlay(RepeatingSteps):
    """Captured steps whose graph is empty: every row draws the same token."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def record(self, step: Callable[[], DecodeOutput]) -> Callable[[], DecodeOutput]:
        tokens = torch.full((self._rows,), 7, dtype=torch.int32)
        empty = torch.empty(0)
        left = DecodeOutput(empty, tokens, empty, empty)
        return lambda: left

    def shared(self, shape: tuple[int, int]) -> torch.Tensor:
        return torch.full(shape, 7, dtype=torch.int32)


class DecodeRunner(ModelRunner):
    """Prompts cost nothing either: their first token is there at once."""

    def run(self, work: StepWork) -> Sampled:
        plan: Any = work.plan
        if plan.num_decode_rows == plan.num_rows:
            return super().run(work)
        for new in work.new_slots:
            self._sampler.set_slot(new.slot, new.params, new.prompt_ids, new.output_ids, new.grammar)
        rows = np.flatnonzero(plan.samples)
        return Sampled(plan.num_rows, rows, _Tokens(len(rows)) if len(rows) else None, [])


class _Tokens:
    """A `SampleOutput`."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.full((count,), 7, dtype=torch.int32)
        self.token_logprobs = self.top_values = self.top_ids = self.chosen = self.nan_rows = None
        self.failures: list[Any] = []


class Later:
    """A step whose tokens are looked at when it is settled, as those of a stream are."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def ready(self) -> bool:
        return True

    def wait(self) -> StepTokens:
        return to_host(self._sampled)


class Executor:
    """Runs a step's host part when it is launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, work: StepWork) -> Later:
        return Later(self._runner.run(work))

    def close(self) -> None:
        """There is nothing to close."""


class HostBench:
    """A loop with `rows` requests that decode, to be stepped by hand."""

    def __init__(self, rows: int, num_steps: int) -> None:
        length = PROMPT + num_steps + 2 * _WARM_STEPS + MAX_ROWS
        scheduler = _scheduler(length)
        requests, metrics = RequestTable(), EngineMetrics("bench", "")
        grammars = GrammarCompiler(GrammarConfig("none", 30.0, 0, True, 1, 2**20, 2), _no_grammars)
        admission = Admission(
            AdmissionConfig(VOCABULARY, length, 1, 0, False, "none", False, 1), scheduler, requests, grammars
        )
        log_config = LogConfig("error", False, 0, False, 40, 0)
        self.log = WatchedLog(log_config, scheduler, requests, StepMetrics(metrics, scheduler, requests))
        self.desk = Desk()
        executor = Executor(_runner(scheduler))
        self.loop = EngineLoop(scheduler, executor, self.desk, admission, requests, self.log, 1)
        self._rows, self._num_steps = rows, num_steps
        self._grammars = grammars

    def measure(self) -> Numbers:
        """Medians of the parts of `num_steps` steps."""
        prompt = (np.arange(PROMPT) % VOCABULARY).astype(np.int32)
        room = self._num_steps + 2 * _WARM_STEPS + MAX_ROWS - 1
        params = SamplingParams(max_new_tokens=room, temperature=0.7, ignore_eos=True)
        self.desk.commands = [Add(f"chatcmpl-{n:024x}", prompt, params, 0, 0) for n in range(self._rows)]
        while self.loop.load().num_running < self._rows:
            self.loop.step()
        for _ in range(_WARM_STEPS):
            self.loop.step()
        parts = self.log.parts = self.desk.parts = Parts()
        for _ in range(self._num_steps):
            begun_s = time.perf_counter()
            self.loop.step()
            parts.add("step", time.perf_counter() - begun_s)
        self._grammars.close()
        return parts.medians_us()


def _scheduler(length: int) -> tokenspeed_cc.Scheduler:
    blocks = -(-length // BLOCK)
    return tokenspeed_cc.Scheduler(
        tokenspeed_cc.SchedulerConfig(
            num_blocks=MAX_ROWS * (blocks + 1) + 64,
            block_size=BLOCK,
            max_num_seqs=MAX_ROWS,
            max_model_len=length,
            max_batched_tokens=8192,
            chunked_prefill=True,
            overlap_depth=1,
            verify_width=1,
            max_decode_gap_tokens=8192,
            enable_prefix_caching=True,
            eos_token_ids=[2],
        )
    )


def _runner(scheduler: tokenspeed_cc.Scheduler) -> ModelRunner:
    cpu = torch.device("cpu")
    tables = scheduler.block_tables()
    state = DeviceState(tables.shape[0], tables.shape[1], BLOCK, cpu, mirrored=True)
    sampler = Sampler(SamplerConfig(tables.shape[0] + 1, VOCABULARY, cpu, (2,)))
    graphs = DecodeGraphs(tuple(range(1, MAX_ROWS + 1)), False, state, 3, NothingToPlay(MAX_ROWS))
    model: Any = None  # nothing is computed
    graphs.capture(model, sampler, [])
    return DecodeRunner(model, sampler, [], tables, state, 3, 1, Captured(graphs, None))


def _no_grammars() -> Any:
    raise RuntimeError("no request of the benchmark is constrained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help=f"decode rows, at most {MAX_ROWS}")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {str(rows): HostBench(rows, arguments.steps).measure() for rows in arguments.rows}
    if arguments.json:
        print(json.dumps(results))
        return
    for rows, numbers in results.items():
        print(f"{rows:>4} rows: " + ", ".join(f"{part} {value}" for part, value in numbers.items()))


if __name__ == "__main__":
    main()
