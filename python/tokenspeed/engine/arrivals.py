# SPDX-License-Identifier: MIT
"""Which transfers of KV blocks are over on all ranks. Carriers say so at their time; what counts is what the first
rank takes before a turn, and tells the others with it, so that all plan alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tokenspeed.kvstore import Moved

WAIT_S = 0.002
"""What a command that comes meanwhile may lose."""


@dataclass(frozen=True, slots=True)
class News:
    """What of the tiers counts from a turn on. now_us: the first rank's time; 0 where nobody asks. is_told: by the
    first rank, whose turn this is."""

    moved: Sequence[Moved]
    now_us: int
    is_told: bool = False

    @property
    def is_due(self) -> bool:
        """Whether there is a turn for its sake."""
        return bool(self.moved) or self.is_told


QUIET = News((), 0)


class Transfers(Protocol):
    clock: Callable[[], int]
    """Of `News`, in microseconds; set before the first turn only. The first rank's counts."""

    def add(self, moved: Moved) -> None:
        """A transfer is over on this rank. Any thread."""

    def take(self) -> News:
        """Those that are over everywhere since the last call, and the time. The loop's thread."""

    def wait(self) -> None:
        """Until there may be something to take, or for a moment. Raises the loss of a rank."""


class Arrivals:
    """The first rank's, or the only one's."""

    def __init__(self, num_ranks: int, check: Callable[[], None]) -> None:
        self.clock: Callable[[], int] = _no_time
        self._num_ranks = num_ranks
        self._check = check
        self._partial: dict[int, dict[int, Moved]] = {}
        self._whole: list[Moved] = []
        self._lock = threading.Lock()
        self._some = threading.Event()

    def add(self, moved: Moved) -> None:
        self.add_of(0, moved)

    def add_of(self, rank: int, moved: Moved) -> None:
        """A transfer is over on a rank."""
        with self._lock:
            by_rank = self._partial.setdefault(moved.transfer_id, {})
            by_rank[rank] = moved
            if len(by_rank) < self._num_ranks:
                return
            del self._partial[moved.transfer_id]
            self._whole.append(together(list(by_rank.values())))
            self._some.set()

    def take(self) -> News:
        with self._lock:
            taken, self._whole = self._whole, []
            self._some.clear()
        return News(taken, self.clock())

    def wait(self) -> None:
        self._check()
        self._some.wait(WAIT_S)


class Told:
    """Another rank's: it reports its own and is handed what counts."""

    def __init__(self, report: Callable[[Moved], None]) -> None:
        self.clock: Callable[[], int] = _no_time
        self._report = report
        self._told = QUIET

    def add(self, moved: Moved) -> None:
        self._report(moved)

    def hand_over(self, news: News) -> None:
        """What the next `take` gives."""
        self._told = replace(news, is_told=True)

    def take(self) -> News:
        taken, self._told = self._told, QUIET
        return taken

    def wait(self) -> None:
        return


def together(parts: Sequence[Moved]) -> Moved:
    """How a transfer went whose parts went so on every rank."""
    ok, done = all(part.ok for part in parts), [part.done for part in parts if part.done is not None]
    return Moved(parts[0].transfer_id, ok, tuple(map(all, zip(*done))) if ok and done else None)


def _no_time() -> int:
    return 0
