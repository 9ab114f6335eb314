# SPDX-License-Identifier: MIT
"""Compiles constraints beside the engine's loop: a few threads, a limit on the time, a bounded cache.

The loop's thread calls `submit`, `take`, `forget`, `close`, none of which waits. Requests with one constraint share one
compilation. A library's call cannot be interrupted: when its time is over the requests are answered, its thread is
counted as lost and another takes its place, up to `max_lost` of them; then new constraints are refused at once until
one comes back. So a hostile constraint costs one thread and some memory, and never the loop.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from tokenspeed.config.constraint import Constraint
from tokenspeed.config.resolve import GrammarConfig
from tokenspeed.grammar.backend import Backend, CompiledGrammar, GrammarError

logger = logging.getLogger("tokenspeed.grammar")

_CLOSE_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of one `submit`: a grammar, or why there is none and whose fault that is."""

    ticket: Hashable
    grammar: CompiledGrammar | None
    error: str
    status: int
    """As HTTP has it: 400 the caller's fault, 503 ours, 0 none."""


@dataclass(eq=False)
class _Job:
    constraint: Constraint
    tickets: list[Hashable]
    deadline_s: float = float("inf")
    """Set when a thread takes it."""
    attempts: int = 0
    is_lost: bool = False
    result: CompiledGrammar | None = None
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class GrammarCompiler:
    """make_backend: loads the library; called once, in the first thread that has work."""

    def __init__(
        self, config: GrammarConfig, make_backend: Callable[[], Backend], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._make_backend = make_backend
        self._clock = clock
        self._backend: Backend | None = None
        self._loading = threading.Lock()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._ready: list[Compiled] = []
        self._jobs: dict[Constraint, _Job] = {}
        self._cache: OrderedDict[Constraint, CompiledGrammar | GrammarError] = OrderedDict()
        self._cache_bytes = 0
        self._num_lost = 0
        self._threads: list[threading.Thread] = []
        for _ in range(config.num_threads):
            self._start_thread()

    @property
    def num_waiting(self) -> int:
        """Tickets that have not been taken."""
        return len(self._ready) + sum(len(job.tickets) for job in self._jobs.values())

    def submit(self, constraint: Constraint, ticket: Hashable) -> None:
        """Ask for a grammar; `take` will tell. constraint: prepared."""
        known = self._cache.get(constraint)
        if known is not None:
            self._cache.move_to_end(constraint)
            self._ready.append(_outcome(ticket, known))
        elif constraint in self._jobs:
            self._jobs[constraint].tickets.append(ticket)
        elif self._num_lost >= self._config.max_lost:
            self._ready.append(Compiled(ticket, None, "every grammar compiler is busy with a grammar without end", 503))
        else:
            job = self._jobs[constraint] = _Job(constraint, [ticket])
            self._queue.put(job)

    def load(self) -> None:
        """Have the library loaded before the first request asks for it."""
        self._queue.put(_Job(Constraint("", "", None), []))

    def forget(self, ticket: Hashable) -> None:
        """Nobody waits for this one any more."""
        self._ready = [entry for entry in self._ready if entry.ticket != ticket]
        for job in self._jobs.values():
            if ticket in job.tickets:
                job.tickets.remove(ticket)

    def take(self) -> list[Compiled]:
        """Everything that has been decided since the last call."""
        while not self._finished.empty():
            self._finish(self._finished.get())
        self._expire()
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Drop what has not begun and end the threads, waiting a little for those at work: an interpreter that ends
        under a library's call takes the process down. A lost one ends with the process."""
        while not self._queue.empty():
            self._queue.get()
        for _ in self._threads:
            self._queue.put(None)
        deadline_s = time.monotonic() + _CLOSE_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # ---- decisions, in the caller's thread ---------------------------------------------------------------------

    def _finish(self, job: _Job) -> None:
        if job.is_lost:
            self._num_lost -= 1
            return  # it was answered when its time was over
        self._jobs.pop(job.constraint, None)
        outcome = job.error if job.error is not None else job.result
        if isinstance(outcome, GrammarError) or (outcome is not None and not isinstance(outcome, BaseException)):
            self._keep(job.constraint, outcome)
        assert outcome is not None
        self._ready += [_outcome(ticket, outcome) for ticket in job.tickets]

    def _expire(self) -> None:
        now_s = self._clock()
        for constraint, job in list(self._jobs.items()):
            with job.lock:
                if now_s < job.deadline_s:
                    continue
                job.is_lost = True
            del self._jobs[constraint]
            self._num_lost += 1
            self._start_thread()
            if job.attempts < self._config.max_retries and self._num_lost < self._config.max_lost:
                again = self._jobs[constraint] = _Job(constraint, job.tickets, attempts=job.attempts + 1)
                self._queue.put(again)
                continue
            logger.warning("a %s took longer than %.1f s to compile", constraint.kind, self._config.timeout_s)
            error = GrammarError(f"it took longer than {self._config.timeout_s:g} s to compile")
            self._keep(constraint, error)
            self._ready += [_outcome(ticket, error) for ticket in job.tickets]

    def _keep(self, constraint: Constraint, outcome: CompiledGrammar | GrammarError) -> None:
        self._cache[constraint] = outcome
        self._cache_bytes += _size(constraint, outcome)
        while self._cache_bytes > self._config.cache_bytes and self._cache:
            oldest, dropped = self._cache.popitem(last=False)
            self._cache_bytes -= _size(oldest, dropped)

    # ---- in the compiling threads -------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            try:
                backend = self._loaded()
                if not job.constraint.kind:
                    continue
                job.deadline_s = self._clock() + self._config.timeout_s
                job.result = backend.compile(job.constraint)
            except GrammarError as error:
                job.error = error
            except Exception as error:  # a fault of the library or of ours: this request's end, not the loop's
                logger.exception("a %s could not be compiled", job.constraint.kind)
                job.error = error
            if not job.constraint.kind:
                continue
            with job.lock:
                job.deadline_s, is_lost = float("inf"), job.is_lost
            self._finished.put(job)
            if is_lost:
                return  # another thread has taken this one's place

    def _loaded(self) -> Backend:
        with self._loading:
            if self._backend is None:
                self._backend = self._make_backend()
            return self._backend


def _outcome(ticket: Hashable, outcome: CompiledGrammar | BaseException) -> Compiled:
    if isinstance(outcome, GrammarError):
        return Compiled(ticket, None, str(outcome), 400)
    if isinstance(outcome, BaseException):
        return Compiled(ticket, None, f"the grammar library failed: {outcome}", 503)
    return Compiled(ticket, outcome, "", 0)


def _size(constraint: Constraint, outcome: CompiledGrammar | GrammarError) -> int:
    own = 256 if isinstance(outcome, GrammarError) else outcome.num_bytes
    return own + 2 * len(constraint.text)
