# SPDX-License-Identifier: MIT
"""How many requests are served at once, and who waits. First come, first served; too many is a 429, never a 5xx.

Lives on the loop's thread. A place is held from the check of the body to the last byte of the answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from types import TracebackType

from tokenspeed.gateway.http.errors import ApiError

RETRY_AFTER_S = 2


class Admission:
    """`limit` places (0: no limit) and `queue_size` seats to wait for one, at most `timeout_s` each."""

    def __init__(self, limit: int, queue_size: int, timeout_s: float) -> None:
        self._limit = limit or math.inf
        self._queue_size = queue_size
        self._timeout_s = timeout_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.num_admitted = 0
        self.num_rejected = 0
        """Requests turned away so far."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """Take a place. Raises `ApiError` 429 when the queue is full or the wait too long."""
        if self.num_admitted < self._limit:
            self.num_admitted += 1
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
