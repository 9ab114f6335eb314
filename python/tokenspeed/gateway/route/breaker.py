# SPDX-License-Identifier: MIT
"""The circuit breaker of one worker: after so many failures in a row it gets no requests for a while, then is tried.

What counts is a fault of the worker alone (`is_fault`): neither what the client did wrong, nor a worker that says that
it is busy, nor the loss of the lane (every request in flight would count it once; the worker is absent then anyway).
A pure machine over a clock; the `Router` asks it, the `Service` tells it. It sheds nothing itself: where every worker's
breaker is open, the router routes as if none were.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.gateway.http.errors import ApiError

_NOT_FAULTS = frozenset({501, 503})
"""What is not built, and what is saturated, away or shutting down: no sign that the worker works badly."""


class BreakerState(enum.IntEnum):
    """The values are those of the gauge `smg_worker_cb_state`."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


@dataclass(frozen=True)
class BreakerOptions:
    """`failures` in a row within `window_s` open it (0: never), `open_s` later it is half open, and then `successes`
    in a row close it while one failure opens it again."""

    failures: int
    window_s: float
    open_s: float
    successes: int


def is_fault(error: ApiError) -> bool:
    """Whether an attempt that ended so speaks against its worker."""
    return error.status >= 500 and error.status not in _NOT_FAULTS


class Breaker:
    """`clock` gives seconds that never go back; `on_change` hears (old, new) of every transition."""

    def __init__(
        self,
        options: BreakerOptions,
        clock: Callable[[], float],
        on_change: Callable[[BreakerState, BreakerState], None],
    ) -> None:
        self._options = options
        self._clock = clock
        self._on_change = on_change
        self._state = BreakerState.CLOSED
        self._opened_s = 0.0
        self._failures: deque[float] = deque(maxlen=max(1, options.failures))
        self.num_failures = 0
        """In a row, up to now."""
        self.num_successes = 0
        """In a row, up to now."""
        self._num_trials = 0

    @property
    def state(self) -> BreakerState:
        """The state now; the end of the open time is noticed here."""
        if self._state is BreakerState.OPEN and self._clock() - self._opened_s >= self._options.open_s:
            self._become(BreakerState.HALF_OPEN)
        return self._state

    @property
    def allows(self) -> bool:
        """Whether the worker should get requests: half open, no more at once than it takes to close."""
        if self.state is BreakerState.HALF_OPEN:
            return self._num_trials < self._options.successes
        return self.state is not BreakerState.OPEN

    def begin(self) -> bool:
        """A request goes to the worker; whether it is a trial, which `end` has to be told."""
        trial = self.state is BreakerState.HALF_OPEN
        self._num_trials += trial
        return trial

    def end(self, trial: bool) -> None:
        """The request is over, whatever came of it."""
        self._num_trials -= trial

    def succeeded(self) -> None:
        """A request ended as it should."""
        state = self.state  # first, because a transition begins the count of successes
        self.num_failures = 0
        self.num_successes += 1
        self._failures.clear()
        if state is BreakerState.HALF_OPEN and self.num_successes >= self._options.successes:
            self._become(BreakerState.CLOSED)

    def failed(self) -> None:
        """A request ended by a fault of the worker."""
        now_s, state = self._clock(), self.state
        self.num_failures += 1
        self.num_successes = 0
        self._failures.append(now_s)
        if state is BreakerState.HALF_OPEN or (state is BreakerState.CLOSED and self._is_full(now_s)):
            self._opened_s = now_s
            self._become(BreakerState.OPEN)

    def _is_full(self, now_s: float) -> bool:
        wanted = self._options.failures
        return 0 < wanted <= len(self._failures) and now_s - self._failures[0] <= self._options.window_s

    def _become(self, state: BreakerState) -> None:
        old, self._state = self._state, state
        self.num_successes = 0
        self._on_change(old, state)
