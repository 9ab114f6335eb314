# SPDX-License-Identifier: MIT
"""The engine's loop. One step: admit what arrived, plan, launch, settle the step before, publish.

One thread runs it and owns the scheduler, the records and the outputs. How many steps are in flight while the next
is planned is a number (`overlap_depth`), not a second loop. Launching never waits for the device; settling does,
for the oldest step only. Without work it sleeps in its frontend. A request's fault ends that request; an error of a
step, or work that cannot be planned, is an `EngineFault` and leaves `run`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tokenspeed.engine.admission import Admission
from tokenspeed.engine.arrivals import News
from tokenspeed.engine.control import Controls
from tokenspeed.engine.errors import EngineFault
from tokenspeed.engine.executor import Executor, StepTokens
from tokenspeed.engine.messages import (
    Abort,
    AbortAll,
    Add,
    Command,
    Connected,
    Control,
    End,
    Frontend,
    LoadNumbers,
    Refused,
)
from tokenspeed.engine.outputs import OutputColumns
from tokenspeed.engine.pending import Pending
from tokenspeed.engine.profiler import Profiler
from tokenspeed.engine.prompt_scores import PromptRow
from tokenspeed.engine.records import RequestRecord, RequestTable
from tokenspeed.engine.runner import NewSlot, StepWork
from tokenspeed.engine.step_log import StepLog
from tokenspeed.engine.step_ranges import NoRanges, StepRanges
from tokenspeed.engine.tier import NO_TIER, Tier
from tokenspeed.engine.turns import Mirror, NoMirror
from tokenspeed.sampling import COSTLY_GRAMMAR, RowFailure
from tokenspeed_cc import Plan, Scheduler

IDLE_WAIT_S = 0.25
COMPILE_WAIT_S = 0.002
"""The same while a grammar is being compiled."""
PAUSED_WAIT_S = 0.02
"""The same while requests wait for the end of a pause."""
SIGN_OF_LIFE_S = 0.5
"""While steps settle and no request has anything to say (a long prefill), the load is published this often."""


class EngineLoop:
    """`overlap_depth`: steps in flight while the next one is planned."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        frontend: Frontend,
        admission: Admission,
        requests: RequestTable,
        log: StepLog,
        overlap_depth: int,
    ) -> None:
        self.scheduler = scheduler
        self.frontend = frontend
        self.requests = requests
        self._executor = executor
        self.admission = admission
        self.log = log
        self._controls = Controls(scheduler)
        self._overlap_depth = overlap_depth
        self._in_flight: deque[tuple[Plan, Pending[StepTokens]]] = deque()
        self._outputs = OutputColumns(requests)
        self._published_s = 0.0
        self._was_busy = False
        self._load_is_due = False
        self.weight_name = ""
        self._paused = False
        self._held_back = False
        """Whether a pause is why nothing could be planned."""
        self.leads = True
        """Whether this is the first rank; set before the first turn only."""
        self.after_turn: Callable[[], None] = nothing
        """Called at the end of every turn; set before the first one only."""
        self.mirror: Mirror = NoMirror()
        """Who tells the other ranks; set before the first turn only."""
        self.tier: Tier = NO_TIER
        """Where blocks go that the device has no room for; set before the first turn only."""
        self.ranges: StepRanges = NoRanges()
        """What profilers of the device see of steps; set before the first turn only."""

    def run(self, stopped: Callable[[], bool]) -> None:
        """Step until `stopped()`; then settle what is in flight. Raises EngineFault."""
        try:
            while not stopped():
                self.step()
            self.settle_all()
        finally:
            self.profiler.close()

    def step(self) -> None:
        commands = self.frontend.drain(self._patience_s())
        self._admit(commands)
        compiled = self.admission.take_compiled()
        news = self.tier.take()
        if commands or compiled or news.is_due or self._in_flight or self.scheduler.has_work():
            self.mirror.turn(commands, [done.verdict for done in compiled], news)
            self._settle_transfers(news)
        for record, rejection in self.admission.queue_compiled(compiled):
            self._outputs.add_unqueued_refusal(record, rejection)
        launched = self._launch()
        if not launched and not self._in_flight:
            self.tier.wait()  # blocks on their way are all that requests can wait for
        while len(self._in_flight) > self._overlap_depth or (self._in_flight and not launched):
            self._settle()
            launched = True  # what settled may have made room: plan again before waiting for more
        costly = self.admission.meter.take()
        if costly and self.leads:  # ranks measure different times, and must end the same
            self.end_costly(costly)
        self._publish()
        self.after_turn()

    def pause(self, mode: str) -> None:
        """As `Scheduler.pause`: "abort", "wait" or "keep"; "abort" also ends who waits for a grammar."""
        if mode == "abort":
            self.abort_requests(lambda _: True)
        self.mirror.operated("pause", mode)
        self.scheduler.pause(mode)
        self._paused = True

    @property
    def is_paused(self) -> bool:
        return self._paused

    def resume(self) -> None:
        self.mirror.operated("resume")
        self.scheduler.resume()
        self._paused = self._held_back = False

    def is_at_rest(self, mode: str) -> bool:
        """Whether a pause has come about: nothing is in flight and, unless it keeps them, no request runs."""
        return not self._in_flight and (mode == "keep" or not self.scheduler.load().num_running)

    def abort_requests(self, chosen: Callable[[str], bool]) -> int:
        """End the live requests whose ids are chosen; how many there were."""
        rids = [record.rid for record in self.requests.all() if chosen(record.rid)]
        self.end(rids)
        return len(rids)

    def end(self, rids: list[str]) -> None:
        """Abort these live requests."""
        self.mirror.operated("end", rids)
        for rid in rids:
            self._abort(self.requests.of_rid(rid), "abort")

    def end_costly(self, request_ids: list[int]) -> None:
        """End requests whose grammars hold up all others."""
        self.mirror.operated("end_costly", request_ids)
        for request_id in request_ids:
            self._fail(request_id, COSTLY_GRAMMAR)

    @property
    def profiler(self) -> Profiler:
        return self._controls.profiler

    def control(self, method: str, args: list[Any]) -> tuple[bool, str]:
        """(success, message) of a call of `Controls`, which every rank makes; the answer is this one's."""
        self.mirror.operated("control", method, args)
        return self._controls.call(method, args)

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests hold blocks."""
        flushed = self.try_flush()
        # Who ended has been answered, and his blocks may still be on their way to the host.
        while not flushed and self.tier.is_busy and self.is_at_rest("wait"):
            self.tier.wait()
            self.settle_transfers(self.tier.take())
            flushed = self.try_flush()
        return flushed

    def try_flush(self) -> bool:
        """The same, without waiting for copies under way; on every rank."""
        self.mirror.operated("try_flush")
        return self.scheduler.flush_cache()

    def set_weight_version(self, version: int) -> None:
        """Share no prefix with what was computed before."""
        self.mirror.operated("set_weight_version", version)
        self.scheduler.set_weight_version(version)
        self.tier.use_weights(version)

    def settle_transfers(self, news: News) -> None:
        """Take the ends of copies between two turns, on every rank."""
        self.mirror.operated("settle_transfers", news)
        self._settle_transfers(news)

    def _settle_transfers(self, news: News) -> None:
        self.tier.settle(news)
        self._load_is_due |= bool(news.moved) and not self.scheduler.has_work()

    def name_weights(self, name: str) -> None:
        """What results say they were served under, from now on; those that are there keep the old name."""
        self._publish()
        self.weight_name = name

    def come_to_rest(self) -> None:
        """`settle_all` on every rank."""
        self.mirror.operated("settle_all")
        self.settle_all()

    def settle_all(self) -> None:
        """Leave no step in flight."""
        while self._in_flight:
            self._settle()

    def _patience_s(self) -> float:
        """How long to wait for commands: not at all while there is work."""
        if self._in_flight or (self.scheduler.has_work() and not self._held_back) or self.tier.is_busy:
            return 0.0
        if self._held_back:
            return PAUSED_WAIT_S
        return COMPILE_WAIT_S if self.admission.num_compiling else IDLE_WAIT_S

    def _admit(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Add):
                rejection = self.admission.admit(command)
                if rejection is not None:
                    self._outputs.add_rejection(rejection)
            elif isinstance(command, Refused):
                self._outputs.add_rejection(command.rejection)
            elif isinstance(command, (Abort, End)):
                reason = "stop" if isinstance(command, End) else "abort"
                for rid in command.rids:
                    self._abort(self.requests.of_rid(rid), reason)
            elif isinstance(command, AbortAll):
                self.log.aborting_all(command.reason)
                for record in self.requests.all():
                    self._abort(record, "abort")
            elif isinstance(command, Connected):
                self._load_is_due = True
            elif isinstance(command, Control):
                command.reply(*self._controls.call(command.method, command.args))

    def _abort(self, record: RequestRecord | None, reason: str) -> None:
        """End a request now; None is one that has ended already. reason: for statistics."""
        if record is None:
            return
        if self.admission.abort(record):
            self._outputs.add_unqueued_abort(record)
            return
        ended = self.scheduler.abort(record.request_id)
        if ended is None:
            raise EngineFault(f"request {record.rid} is live here and unknown to the scheduler")
        self._outputs.add_abort(record, ended, reason)

    def _fail(self, request_id: int, why: RowFailure) -> None:
        """End a request that cannot go on, before its step's token counts; it may have ended meanwhile."""
        record = self.requests.get(request_id)
        if record is None or self.scheduler.abort(request_id) is None:
            return
        self.log.failed(why)
        self._outputs.add_failure(record, why)

    def _launch(self) -> bool:
        """Plan a step and launch it; False when nothing can be launched before something settles or arrives."""
        if not self._in_flight and not self.scheduler.has_work():
            self._held_back = False
            return False  # a planner that is not asked is the same on every rank
        begun_s = time.perf_counter()
        with self.ranges.part("plan"):
            plan = self.scheduler.plan()
            self.tier.launch()
        if plan is None:
            self._held_back = self._paused and not self._in_flight and self.scheduler.has_work()
            stuck = not self._in_flight and not self.tier.is_busy
            if stuck and self.scheduler.has_work() and not self._paused:
                raise EngineFault("requests are waiting, nothing is in flight, and no step can be planned")
            return False
        self._held_back = False
        self.mirror.planned(plan)
        planned_s = self.log.took("plan", begun_s)
        self.log.launched(plan)
        self.ranges.step_begins(plan)
        with self.ranges.part("launch"):
            self._in_flight.append((plan, self._executor.launch(self._work(plan))))
        self.log.took("launch", planned_s)
        return True

    def _work(self, plan: Plan) -> StepWork:
        new_slots = [
            NewSlot(slot, record.params, record.prompt_ids, np.asarray(record.output_ids, np.int32), record.grammar)
            for slot, record in zip(
                plan.new_slots.tolist(),
                (self.requests[request_id] for request_id in plan.new_slot_request_ids.tolist()),
            )
        ]
        return StepWork(plan, new_slots, self.requests.num_logprobs, self._prompt_rows(plan))

    def _prompt_rows(self, plan: Plan) -> list[PromptRow]:
        if not self.requests.any_scoring:
            return []
        rows = []
        for row in range(plan.num_decode_rows, plan.num_rows):
            request_id = int(plan.request_ids[row])
            scores = self.requests[request_id].prompt_scores
            due = scores and scores.due(request_id, row, int(plan.context_lens[row]), int(plan.query_lens[row]))
            if due:
                rows.append(due)
        return rows

    def _settle(self) -> None:
        """Wait for the oldest step and take what it means."""
        plan, pending = self._in_flight.popleft()
        begun_s = time.perf_counter()
        with self.ranges.part("device"):
            tokens = pending.wait()
        self.profiler.settled()
        self.mirror.settled(tokens.token_ids)
        begun_s = self.log.took("device", begun_s)
        self.log.computed(plan)
        with self.ranges.part("settle"):
            self._take_outcome(plan, tokens)
        self.log.took("settle", begun_s)
        self.ranges.step_ends(plan)

    def _take_outcome(self, plan: Plan, tokens: StepTokens) -> None:
        for row, why in tokens.failures:
            self._fail(int(plan.request_ids[row]), why)
        outcome = self.scheduler.advance(plan.step_id, tokens.token_ids, tokens.num_tokens)
        self.tier.launch()
        self._outputs.add_prompt_pieces(tokens.prompt_pieces)
        self._outputs.add_step(outcome, tokens)
        self.log.settled(plan, outcome, tokens.num_tokens)

    def _publish(self) -> None:
        """Hand results on; and the load, when it has changed without a result or has not been told for a while."""
        now_s = time.monotonic()
        busy = bool(self._in_flight) or self.scheduler.has_work()
        if self._was_busy and not busy:
            self._load_is_due = True
            self.log.idle()
        self._was_busy = busy
        if self._outputs or self._load_is_due or (busy and now_s - self._published_s > SIGN_OF_LIFE_S):
            for record, reason in self._outputs.finished:
                self.log.finished(record, reason)
            self.log.load_changed(self.admission.num_compiling)
            self.frontend.publish(self._outputs.take(self.load(), self.weight_name))
            self._published_s, self._load_is_due = now_s, False

    def load(self) -> LoadNumbers:
        """Requests and KV blocks now. The loop's thread only."""
        load = self.scheduler.load()
        waiting = load.num_waiting + self.admission.num_compiling
        return LoadNumbers(load.num_running, waiting, load.active_blocks, load.total_blocks)


def nothing() -> None:
    """What is called after a turn where nobody asked for anything."""
