# SPDX-License-Identifier: MIT
"""What the loop says about steps and requests: it feeds the clocks and meters of `observability` and logs their lines.

`Prefill batch.` or `Mix batch.` for every step that prefills, `Decode batch.` every `decode_log_interval` decode
steps, `Req: <id> Finish!` when a request ends. Called by the loop's thread with numbers that exist anyway; the one
thing that costs a look at every row, delays of decodes, is only kept when request statistics are on.
"""

from __future__ import annotations

import logging
import time

import numpy as np
from numpy.typing import NDArray

from tokenspeed.config.resolve import LogConfig
from tokenspeed.engine.outputs import OutcomeView
from tokenspeed.engine.records import RequestRecord, RequestTable
from tokenspeed.engine.step_metrics import Counters, NotQueued, StepMetrics
from tokenspeed.observability.log_lines import Blocks, DecodeBatch, DecodeMeter, PrefillBatch
from tokenspeed.observability.request_stats import finish_line
from tokenspeed.observability.traces import Attributes, PassingOn, Tracer
from tokenspeed.sampling import NUMERICAL_ERROR, RowFailure
from tokenspeed_cc import Plan, Scheduler

logger = logging.getLogger("tokenspeed.engine")


class StepLog:
    """`muted`: say and count nothing (warm-up)."""

    def __init__(self, config: LogConfig, scheduler: Scheduler, requests: RequestTable, metrics: StepMetrics) -> None:
        self._config = config
        self._scheduler = scheduler
        self._requests = requests
        self._metrics = metrics
        self._meter = DecodeMeter(config.decode_log_interval) if config.decode_log_interval else None
        self._delayed: set[int] = set()
        self._num_compiling = 0
        self.muted = False
        self.tracer: Tracer = PassingOn()
        """Where a span of every request goes."""

    @property
    def data_rank(self) -> int:
        """The number of this replica."""
        return self._config.data_rank

    @property
    def _speaks(self) -> bool:
        return not self.muted and logger.isEnabledFor(logging.INFO)

    def launched(self, plan: Plan) -> None:
        """Set the clocks of requests that started; describe a step that prefills."""
        if not self.muted:
            self._metrics.launched(plan)
        if self._meter is not None and plan.num_decode_rows and not self.muted:
            self._meter.launched(time.monotonic())
        if plan.num_decode_rows == plan.num_rows:
            if self._delayed:
                self._end_delays()
            return
        now = time.time()
        first = plan.num_decode_rows
        for request_id in plan.request_ids[first:].tolist():
            self._requests[request_id].clock.scheduled(now)
        if self._config.log_request_stats and first:
            self._begin_delays(plan.request_ids[:first].tolist(), now)
        if self._speaks:
            logger.info("%s", self._prefill_batch(plan).line())

    def computed(self, plan: Plan) -> None:
        """A step's results are there: prompts whose last chunk it had are complete."""
        first = plan.num_decode_rows
        if first == plan.num_rows:
            return
        last_chunks = plan.request_ids[first:][plan.samples[first:].astype(bool)].tolist()
        now = time.time()
        for request_id in last_chunks:
            record = self._requests.get(request_id)
            if record is not None:
                record.clock.prefilled(now)

    def took(self, part: str, since_s: float) -> float:
        """A part of a step has ended that began at `since_s` (time.perf_counter()); returns the time now."""
        now_s = time.perf_counter()
        if not self.muted:
            self._metrics.metrics.part_took(part, now_s - since_s)
        return now_s

    def load_changed(self, num_compiling: int) -> None:
        """Requests came, went on or ended."""
        self._num_compiling = num_compiling
        self._metrics.load_changed(num_compiling)

    def settled(self, plan: Plan, outcome: OutcomeView, num_tokens: NDArray[np.int32]) -> None:
        """Count a step's tokens; every `decode_log_interval` decode steps, say how fast they come."""
        if not self.muted:
            self._metrics.settled(plan, outcome)
        if self._meter is None or not plan.num_decode_rows or self.muted:
            return
        tokens_per_s = self._meter.settled(int(num_tokens.sum()), time.monotonic())
        if tokens_per_s is not None and self._speaks:
            logger.info("%s", self._decode_batch(plan, tokens_per_s).line())

    def idle(self) -> None:
        """Nothing runs any more."""
        if self._meter is not None:
            self._meter.idle()

    def finished(self, record: RequestRecord, reason: str) -> None:
        """The request's one line."""
        self._delayed.discard(record.request_id)
        if self.muted:
            return
        counters = self._scheduler.stats(record.request_id) if record.is_queued else NotQueued(len(record.prompt_ids))
        self._metrics.ended(record, reason, counters)
        if not isinstance(self.tracer, PassingOn):
            times_ts = record.clock.recv_ts, time.time()
            self.tracer.record("engine request", record.traceparent, times_ts, _span_of(record, reason, counters))
        if not self._config.log_requests or not self._speaks:
            return
        line = self._finish_line(record, reason, counters)
        if self._config.log_requests_level >= 1:
            line += f" {record.params}"
        if self._config.log_requests_level >= 2:
            line += f" prompt_ids={record.prompt_ids.tolist()} output_ids={record.output_ids}"
        logger.info("%s", line)

    def failed(self, why: RowFailure) -> None:
        """A request ends because a step had no token for it."""
        if why is NUMERICAL_ERROR and not self.muted:
            self._metrics.metrics.nan_aborted()

    def moved(self, direction: str, num_bytes: int | None) -> None:
        """A transfer of KV between tiers is over; None: it failed."""
        if self.muted:
            return
        if num_bytes is None:
            self._metrics.metrics.transfer_failed(direction)
        else:
            self._metrics.metrics.blocks_moved(direction, num_bytes)

    def aborting_all(self, reason: str) -> None:
        level = logging.WARNING if self._requests else logging.INFO
        logger.log(level, "aborting %d requests: %s", len(self._requests), reason)

    def _finish_line(self, record: RequestRecord, reason: str, counters: Counters) -> str:
        if not self._config.log_request_stats:
            per_row = counters.completion_tokens / max(1, record.num_outputs)
            return f"Req: {record.rid} Finish! Accept_num_tokens_avg: {per_row:.2f}"
        stats = record.clock.stats(
            reason, counters.prompt_tokens, counters.cached_tokens, counters.completion_tokens, time.time()
        )
        return finish_line(record.rid, stats)

    def _prefill_batch(self, plan: Plan) -> PrefillBatch:
        load = self._scheduler.load()
        started = map(self._scheduler.stats, plan.new_slot_request_ids.tolist())
        return PrefillBatch(
            dp_rank=self._config.data_rank,
            num_new_seqs=plan.num_rows - plan.num_decode_rows,
            num_new_tokens=len(plan.prompt_token_ids),
            num_cached_tokens=sum(counters.cached_tokens for counters in started if not counters.num_retractions),
            num_decode=plan.num_decode_rows,
            num_running=load.num_running,
            num_queued=load.num_waiting + self._num_compiling,
        )

    def _decode_batch(self, plan: Plan, tokens_per_s: float) -> DecodeBatch:
        load = self._scheduler.load()
        return DecodeBatch(
            dp_rank=self._config.data_rank,
            num_running=load.num_running,
            mean_seq_len=float(plan.context_lens[: plan.num_decode_rows].mean()) + 1,
            blocks=Blocks(load.active_blocks, load.cached_blocks, load.total_blocks),
            tokens_per_s=tokens_per_s,
            accept_len=None,
            accept_rate=None,
            num_queued=load.num_waiting + self._num_compiling,
        )

    def _begin_delays(self, request_ids: list[int], now: float) -> None:
        for request_id in request_ids:
            self._requests[request_id].clock.decode_delayed(True, now)
        self._delayed.update(request_ids)

    def _end_delays(self) -> None:
        now = time.time()
        for request_id in self._delayed:
            self._requests[request_id].clock.decode_delayed(False, now)
        self._delayed.clear()


def _span_of(record: RequestRecord, reason: str, counters: Counters) -> Attributes:
    """What a span says of a request that has ended; times in seconds after its arrival."""
    clock = record.clock
    times = {
        "tokenspeed.time_to_scheduled_s": clock.commit_ts,
        "tokenspeed.time_to_prefilled_s": clock.prefilled_ts,
        "tokenspeed.time_to_first_token_s": clock.first_token_ts,
    }
    return {
        "tokenspeed.request_id": record.rid,
        "tokenspeed.finish_reason": reason,
        "gen_ai.usage.input_tokens": counters.prompt_tokens,
        "gen_ai.usage.output_tokens": counters.completion_tokens,
        "tokenspeed.cached_tokens": counters.cached_tokens,
        **{name: ts - clock.recv_ts for name, ts in times.items() if ts is not None},
    }
