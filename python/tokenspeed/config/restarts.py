# SPDX-License-Identifier: MIT
"""How often, and after which pauses, a process that died is started again. Pure; whoever starts processes asks it."""

from __future__ import annotations

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
HEALTHY_S = 60.0
"""A restarted process that lives this long has earned its chances back."""


class Restarts:
    """How often processes have been started again since all was well. `now_s` are readings of a steady clock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._last_s = 0.0

    @property
    def are_spent(self) -> bool:
        """Whether there were some, and none is left."""
        return 0 < self._limit <= self._count

    def pause_s(self, now_s: float) -> float | None:
        """How long to wait before the next start; None when there were enough of them."""
        if now_s - self._last_s > HEALTHY_S:
            self._count = 0
        if self._count >= self._limit:
            return None
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._count, 64), LONGEST_PAUSE_S)  # no number is too large
        self._count += 1
        self._last_s = now_s + pause_s
        return pause_s
