# SPDX-License-Identifier: MIT
"""Places by class of request (`--priority-scheduler-enabled`): higher classes first, with places of their own.

A class leaves free what higher ones have reserved and do not use. Whoever has waited too long is next nevertheless. A
request of a class that may preempt ends one of a lower class, unless that has begun to be answered. Lives on the loop's
thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from tokenspeed.config.gateway_priorities import CLASSES, PriorityConfig
from tokenspeed.gateway.http.admission import RateLimit
from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.observability.scheduler_metrics import TENANT, ClassState, SchedulerMetrics

_DEFAULT = CLASSES.index("default")


@dataclass(eq=False)
class _Seat:
    """In a queue. `free`: whether there is a place for it."""

    free: asyncio.Future[None]
    since_s: float


class Place:
    """An async context manager: a request of the class of number `rank` that is served."""

    def __init__(self, owner: PriorityAdmission, rank: int) -> None:
        self.rank = rank
        self.begun: Callable[[], bool] = bool
        """Whether the answer has begun to go out."""
        self.preempted = False
        self._owner = owner
        self._task: asyncio.Task[object]

    async def __aenter__(self) -> None:
        """Take a place. Raises `ApiError` 429 and 408."""
        task = asyncio.current_task()
        assert task is not None  # only coroutines wait
        self._task, self._num_cancels = task, task.cancelling()
        await self._owner.enter(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.leave(self)
        if self.preempted and self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            message = "the place of this request was needed for one of a higher class"
            raise ApiError(503, "scheduler_preempted", message, None, 1) from error

    def preempt(self) -> None:
        """End the request."""
        self.preempted = True
        self._task.cancel()


class PriorityAdmission:
    """`limit` places; 0: no limit."""

    def __init__(
        self,
        limit: int,
        config: PriorityConfig,
        rate: RateLimit,
        metrics: SchedulerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit or math.inf
        self._rules = [config.classes[name] for name in CLASSES]
        self._most = CLASSES.index(config.most)
        self._rate, self._metrics, self._clock = rate, metrics, clock
        self._served: list[dict[Place, None]] = [{} for _ in CLASSES]
        self._waiting: list[deque[_Seat]] = [deque() for _ in CLASSES]
        self._promised = [0] * len(CLASSES)
        """Places given to requests that have not woken up yet."""
        self._num_leaving = 0
        """Preempted requests that have not left yet."""
        self.num_let_in = 0
        self._num_refused = 0

    @property
    def num_admitted(self) -> int:
        """Requests that have a place."""
        return sum(map(len, self._served))

    @property
    def num_waiting(self) -> int:
        """Requests in all queues."""
        return sum(map(len, self._waiting))

    @property
    def num_rejected(self) -> int:
        """Requests turned away so far."""
        return self._num_refused + self._rate.num_rejected

    def place(self, asked: str | None) -> Place:
        """A place for a request that names the class `asked`; one that is none is default."""
        rank = _DEFAULT
        if asked is not None:
            name = asked.strip().lower()
            if name in CLASSES:
                rank = CLASSES.index(name)
            else:
                self._metrics.unknown.labels(TENANT).inc()
        if rank > self._most:
            self._metrics.clamped.labels(TENANT, CLASSES[rank], CLASSES[self._most]).inc()
            rank = self._most
        return Place(self, rank)

    async def enter(self, place: Place) -> None:
        """Wait for a place. Raises `ApiError` 429 where requests come too fast or too many wait, and 408."""
        self._rate.check()
        rank, rules, queue = place.rank, self._rules[place.rank], self._waiting[place.rank]
        if queue or self._room(rank) < 1:
            if len(queue) >= rules.queue_size:
                self._refused(rank, "rejected_queue_full")
                raise ApiError(
                    429, "scheduler_queue_full", f"{len(queue)} requests of this class wait already", None, 1
                )
            await self._wait(rank)
        self._served[rank][place] = None
        self.num_let_in += 1
        self._metrics.admissions.labels(CLASSES[rank], "admitted").inc()

    async def _wait(self, rank: int) -> None:
        rules, queue = self._rules[rank], self._waiting[rank]
        loop = asyncio.get_running_loop()
        seat = _Seat(loop.create_future(), self._clock())
        queue.append(seat)
        starved = loop.call_later(rules.starvation_s, self._seat_next)
        self._preempt(rank)
        try:
            async with asyncio.timeout(rules.queue_timeout_s):
                await seat.free
        except TimeoutError:
            self._stand_up(rank, seat)
            self._refused(rank, "rejected_queue_timeout")
            message = f"no place became free in {rules.queue_timeout_s:g} s"
            raise ApiError(408, "scheduler_queue_timeout", message) from None
        except asyncio.CancelledError:
            self._stand_up(rank, seat)
            self._metrics.admissions.labels(CLASSES[rank], "client_cancelled").inc()
            raise
        finally:
            starved.cancel()
            self._metrics.wait_s.labels(CLASSES[rank]).observe(self._clock() - seat.since_s)
        self._promised[rank] -= 1

    def _stand_up(self, rank: int, seat: _Seat) -> None:
        if seat in self._waiting[rank]:
            self._waiting[rank].remove(seat)
        elif not seat.free.cancelled():
            self._promised[rank] -= 1  # it was given a place in the same moment
            self._seat_next()

    def leave(self, place: Place) -> None:
        """The request is over."""
        del self._served[place.rank][place]
        self._num_leaving -= place.preempted
        self._seat_next()

    def show(self) -> None:
        """Tell the metrics how things stand."""
        states = {}
        for rank, name in enumerate(CLASSES):
            num_served, room = len(self._served[rank]), self._room(rank)
            num_places = num_served + (0 if room == math.inf else max(0, int(room)))
            states[name] = ClassState(num_served, len(self._waiting[rank]), self._rules[rank].queue_size, num_places)
        self._metrics.show(states, 0.0 if self._limit == math.inf else self.num_admitted / self._limit)

    def _taken(self, rank: int) -> int:
        return len(self._served[rank]) + self._promised[rank]

    def _room(self, rank: int) -> float:
        """Places that a class may take now."""
        kept = sum(max(0, self._rules[above].reserved - self._taken(above)) for above in range(rank + 1, len(CLASSES)))
        return self._limit - sum(map(self._taken, range(len(CLASSES)))) - kept

    def _seat_next(self) -> None:
        """Give the places that are free to those who are next."""
        while (rank := self._next()) is not None:
            seat = self._waiting[rank].popleft()
            if not seat.free.done():
                self._promised[rank] += 1
                seat.free.set_result(None)

    def _next(self) -> int | None:
        waiting = [rank for rank, queue in enumerate(self._waiting) if queue]
        if not waiting:
            return None
        if self._room(len(CLASSES) - 1) >= 1:
            now_s = self._clock()
            starved = [r for r in waiting if now_s - self._waiting[r][0].since_s >= self._rules[r].starvation_s]
            if starved:
                rank = min(starved, key=lambda r: self._waiting[r][0].since_s)
                if rank != waiting[-1]:
                    self._metrics.promotions.labels(CLASSES[rank]).inc()
                return rank
        return waiting[-1] if self._room(waiting[-1]) >= 1 else None

    def _preempt(self, rank: int) -> None:
        """End a request of the lowest class, the one that came last, if those who may preempt outnumber those who
        leave."""
        if not self._rules[rank].may_preempt:
            return
        wanted = sum(len(queue) for queue, rules in zip(self._waiting, self._rules) if rules.may_preempt)
        if wanted <= self._num_leaving:
            return
        for lower in range(rank):
            for victim in reversed(self._served[lower]):
                if not victim.preempted and not victim.begun():
                    self._num_leaving += 1
                    self._metrics.preemptions.labels(CLASSES[lower], CLASSES[rank]).inc()
                    self._metrics.admissions.labels(CLASSES[lower], "preempted").inc()
                    victim.preempt()
                    return

    def _refused(self, rank: int, outcome: str) -> None:
        self._num_refused += 1
        self._metrics.admissions.labels(CLASSES[rank], outcome).inc()
