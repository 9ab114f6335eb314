# SPDX-License-Identifier: MIT
"""The policy `bucket`: short prompts go to one worker, longer ones to the next, so that none waits behind a long one.

The lengths of the last prompts are divided, every so often, into as many ranges as there are workers, each with the
same number of tokens in all.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Sequence

from tokenspeed.gateway.route.policy import Asked, Choice, Overload, W, least_loaded

_REMEMBERED = 4096
"""Prompts whose lengths are divided."""


class Bucket:
    """`clock` gives seconds that never go back. The first worker takes the shortest prompts."""

    name = "bucket"
    remembers = ""

    def __init__(self, interval_s: float, overload: Overload, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._overload = overload
        self._clock = clock
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)
        self._bounds: list[int] = []
        """The longest prompt of each range but the last."""
        self._num_workers = 0
        self._cut_s = clock()

    @property
    def num_remembered(self) -> int:
        """Lengths of prompts."""
        return len(self._lengths)

    def choose(self, workers: Sequence[W], asked: Asked) -> Choice[W]:
        """Branches: bucket, spill (its worker is overloaded), unknown (no lengths yet: the least loaded)."""
        length = len(asked.tokens)
        now_s = self._clock()
        if self._lengths and (now_s - self._cut_s >= self._interval_s or self._num_workers != len(workers)):
            self._cut_s, self._num_workers = now_s, len(workers)
            self._bounds = _cut(sorted(self._lengths), len(workers))
        self._lengths.append(length)
        if not self._num_workers:
            return Choice(least_loaded(workers), "unknown")
        worker = workers[bisect.bisect_left(self._bounds, length)]
        if self._overload.holds(worker, workers):
            return Choice(least_loaded(workers), "spill")
        return Choice(worker, "bucket")

    def forget(self, url: str) -> None:
        """Lengths are nobody's."""

    def num_keys(self, url: str) -> int:
        """It keeps no keys."""
        return 0


def _cut(lengths: Sequence[int], num_ranges: int) -> list[int]:
    """The upper bounds of all ranges but the last, each range with about the same sum of `lengths` (ascending)."""
    total, passed = sum(lengths), 0
    bounds: list[int] = []
    for length in lengths:
        passed += length
        while len(bounds) < num_ranges - 1 and passed * num_ranges >= total * (len(bounds) + 1):
            bounds.append(length)
    return bounds + [lengths[-1]] * (num_ranges - 1 - len(bounds))
