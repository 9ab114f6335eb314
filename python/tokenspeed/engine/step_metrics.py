# SPDX-License-Identifier: MIT
"""From what the loop sees of steps and requests to the engine's metrics. Called by the loop's thread.

Work is by step and by request, never by token; the gaps between the outputs of a full batch are one array operation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenspeed.engine.outputs import OutcomeView
from tokenspeed.engine.records import RequestRecord, RequestTable
from tokenspeed.observability.engine_metrics import EngineMetrics, FinishedSample, LoadSample
from tokenspeed_cc import Plan, RequestCounters, Scheduler


@dataclass(frozen=True)
class NotQueued:
    """What the scheduler would count of a request that it never had."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0


Counters = RequestCounters | NotQueued


class StepMetrics:
    """`metrics`: where the numbers go, and what `/metrics` renders."""

    def __init__(self, metrics: EngineMetrics, scheduler: Scheduler, requests: RequestTable) -> None:
        self.metrics = metrics
        self._scheduler = scheduler
        self._requests = requests
        # By slot: when its request was last heard of. NaN: not yet, or not since it came back from a retraction.
        self._last_output_s: NDArray[np.float64] = np.full(scheduler.block_tables().shape[0], np.nan)

    def launched(self, plan: Plan) -> None:
        """Count where the prompt tokens of a step come from."""
        self._last_output_s[plan.new_slots] = np.nan
        if len(plan.prompt_token_ids):
            self.metrics.prompt_tokens_from("computed", len(plan.prompt_token_ids))
        for request_id in plan.new_slot_request_ids.tolist():
            counters = self._scheduler.stats(request_id)
            if not counters.num_retractions:  # who comes back had its hits counted
                elsewhere = counters.host_tokens + counters.store_tokens
                self.metrics.prompt_tokens_from("device_hit", counters.cached_tokens - elsewhere)
                self.metrics.prompt_tokens_from("host_hit", counters.host_tokens)
                self.metrics.prompt_tokens_from("store_hit", counters.store_tokens)

    def settled(self, plan: Plan, outcome: OutcomeView) -> None:
        """Count a step's tokens and the time since its requests were last heard of."""
        self.metrics.step_settled(int(plan.query_lens.sum()))
        rows = outcome.rows[outcome.rows >= 0]
        if not len(rows):
            return
        now_s, slots = time.monotonic(), plan.slots[rows]
        gaps_s = now_s - self._last_output_s[slots]
        self.metrics.token_gaps(gaps_s[~np.isnan(gaps_s)])
        self._last_output_s[slots] = now_s

    def load_changed(self, num_compiling: int) -> None:
        """num_compiling: requests that wait for their grammar, outside the scheduler."""
        load = self._scheduler.load()
        waiting = load.num_waiting + num_compiling
        since_ts = self._requests.oldest_waiting_ts() if waiting else None
        self.metrics.host_blocks_changed(load.host_cached_blocks, load.host_reserved_blocks, load.host_free_blocks)
        self.metrics.load_changed(
            LoadSample(load.num_running, waiting, load.active_blocks, load.cached_blocks, load.free_blocks, since_ts)
        )

    def ended(self, record: RequestRecord, reason: str, counters: Counters) -> None:
        """A request that was admitted has ended."""
        now, clock = time.time(), record.clock
        first_token_s = None if clock.first_token_ts is None else clock.first_token_ts - clock.recv_ts
        self.metrics.request_ended(
            FinishedSample(
                reason != "abort",
                counters.prompt_tokens,
                counters.cached_tokens,
                counters.completion_tokens,
                first_token_s,
                now - clock.recv_ts,
            )
        )
