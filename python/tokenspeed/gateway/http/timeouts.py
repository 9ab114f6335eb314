# SPDX-License-Identifier: MIT
"""Time limits that cost little where nearly everything ends in time.

All that is watched by one `Timeouts` has the same time, so it runs out in the order in which it began: a dictionary
keeps that order, and the loop has one timer for the oldest instead of one for each. Lives on the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class Timeouts:
    """Calls `on_late` of what is not ended within `timeout_s` of its beginning, once each."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._due_s: dict[Callable[[], None], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, on_late: Callable[[], None]) -> None:
        """Watch from now on, if not watched yet. Equal callables are the same."""
        if on_late in self._due_s:
            return
        loop = asyncio.get_running_loop()
        due_s = self._due_s[on_late] = loop.time() + self.timeout_s
        if self._timer is None:
            self._timer = loop.call_at(due_s, self._look)

    def end(self, on_late: Callable[[], None]) -> None:
        """It is over, in time or not."""
        self._due_s.pop(on_late, None)

    def _look(self) -> None:
        """Call those that are late, and come again when the oldest of the others would be."""
        loop = asyncio.get_running_loop()
        self._timer = None
        now_s = loop.time()
        while self._due_s:
            on_late, due_s = next(iter(self._due_s.items()))
            if due_s > now_s:
                self._timer = loop.call_at(due_s, self._look)
                return
            del self._due_s[on_late]
            on_late()


class TimeLimit:
    """A context manager, as `asyncio.timeout` for the running task, on a timer that it shares with others."""

    __slots__ = ("_late", "_num_cancels", "_task", "_timeouts")

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._late = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # only coroutines wait
        self._task = task
        self._num_cancels = task.cancelling()
        self._timeouts.begin(self._on_late)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeouts.end(self._on_late)
        if self._late and self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _on_late(self) -> None:
        self._late = True
        self._task.cancel()
