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


class Admission:
    """`limit` places (0: no limit) and `queue_size` seats to wait for one, at most `timeout_s` each. `rate_per_s`:
    requests that may come in a second for long, 0 for any number; as many at once as there are places."""

    def __init__(
        self,
        limit: int,
        queue_size: int,
        timeout_s: float,
        rate_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit or math.inf
        self._rate_per_s = rate_per_s
        self._clock = clock
        self._burst = float(limit or max(1.0, rate_per_s))
        self._allowed, self._allowed_s = self._burst, clock()
        """Requests that may come at once, by when."""
        self._queue_size = queue_size
        self._timeout_s = timeout_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.num_admitted = 0
        self.num_let_in = 0
        """Requests that got a place so far."""
        self.num_rejected = 0
        """Requests turned away so far."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """Take a place. Raises `ApiError` 429 when requests come too fast, the queue is full or the wait too long."""
        self._check_rate()
        if self.num_admitted < self._limit:
            self.num_admitted += 1
            self.num_let_in += 1
            return
        if len(self._waiting) >= self._queue_size:
            self.num_rejected += 1
            raise _too_many("admission_queue_full", f"{self.num_admitted} requests are served and the queue is full")
        seat: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(seat)
        try:
            async with asyncio.timeout(self._timeout_s):
                await seat
        except TimeoutError:
            self._leave(seat)
            self.num_rejected += 1
            raise _too_many("admission_queue_timeout", f"no place became free in {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._leave(seat)
            raise
        self.num_let_in += 1

    def _check_rate(self) -> None:
        if not self._rate_per_s:
            return
        now_s = self._clock()
        self._allowed = min(self._burst, self._allowed + (now_s - self._allowed_s) * self._rate_per_s)
        self._allowed_s = now_s
        if self._allowed < 1:
            self.num_rejected += 1
            wait_s = math.ceil((1 - self._allowed) / self._rate_per_s)
            message = f"more than {self._rate_per_s:g} requests a second"
            raise ApiError(429, "rate_limit_exceeded", message, None, wait_s)
        self._allowed -= 1

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
