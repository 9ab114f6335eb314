# SPDX-License-Identifier: MIT
"""How many requests are served at once, and who waits. First come, first served; too many is a 429, never a 5xx.

Lives on the loop's thread. A place is held from the check of the body to the last byte of the answer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from tokenspeed.gateway.http.errors import ApiError

RETRY_AFTER_S = 2


class RateLimit:
    """`per_s`: requests that may come in a second for long, 0 for any number; `burst` of them at once."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._allowed, self._allowed_s = burst, clock()
        """Requests that may come at once, by when."""
        self.num_rejected = 0

    def check(self) -> None:
        """A request has come. Raises `ApiError` 429."""
        if not self._per_s:
            return
        now_s = self._clock()
        self._allowed = min(self._burst, self._allowed + (now_s - self._allowed_s) * self._per_s)
        self._allowed_s = now_s
        if self._allowed < 1:
            self.num_rejected += 1
            wait_s = math.ceil((1 - self._allowed) / self._per_s)
            message = f"more than {self._per_s:g} requests a second"
            raise ApiError(429, "rate_limit_exceeded", message, None, wait_s)
        self._allowed -= 1


def rate_limit(per_s: float, limit: int, clock: Callable[[], float] = time.monotonic) -> RateLimit:
    """As many at once as there are places."""
    return RateLimit(per_s, float(limit or max(1.0, per_s)), clock)


class Admission:
    """`limit` places (0: no limit) and `queue_size` seats to wait for one, at most `timeout_s` each."""

    def __init__(
        self,
        limit: int,
        queue_size: int,
        timeout_s: float,
        rate: RateLimit,
    ) -> None:
        self._limit = limit or math.inf
        self._rate = rate
        self._queue_size = queue_size
        self._timeout_s = timeout_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.num_admitted = 0
        self.num_let_in = 0
        """Requests that got a place so far."""
        self._num_refused = 0

    @property
    def num_rejected(self) -> int:
        """Requests turned away so far."""
        return self._num_refused + self._rate.num_rejected

    def place(self, asked: str | None) -> Admission:
        """For a request that names the class `asked`, of which there are none here."""
        return self

    def show(self) -> None:
        """There is nothing more to tell."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """Take a place. Raises `ApiError` 429 when requests come too fast, the queue is full or the wait too long."""
        self._rate.check()
        if self.num_admitted < self._limit:
            self.num_admitted += 1
            self.num_let_in += 1
            return
        if len(self._waiting) >= self._queue_size:
            self._num_refused += 1
            raise _too_many("admission_queue_full", f"{self.num_admitted} requests are served and the queue is full")
        seat: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(seat)
        try:
            async with asyncio.timeout(self._timeout_s):
                await seat
        except TimeoutError:
            self._leave(seat)
            self._num_refused += 1
            raise _too_many("admission_queue_timeout", f"no place became free in {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._leave(seat)
            raise
        self.num_let_in += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._free()

    def _free(self) -> None:
        while self._waiting:
            seat = self._waiting.popleft()
            if not seat.done():
                # The place changes hands without becoming free, so nobody overtakes.
                seat.set_result(None)
                return
        self.num_admitted -= 1

    def _leave(self, seat: asyncio.Future[None]) -> None:
        if seat.done() and not seat.cancelled():
            self._free()
        elif seat in self._waiting:
            self._waiting.remove(seat)


def _too_many(code: str, message: str) -> ApiError:
    return ApiError(429, code, message, None, RETRY_AFTER_S)
