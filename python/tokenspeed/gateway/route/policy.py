# SPDX-License-Identifier: MIT
"""Which of several ready workers gets a request. Pure: a policy sees loads and gives a worker back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Loaded(Protocol):
    """What a policy knows of a worker."""

    @property
    def num_in_flight(self) -> int:
        """Requests of ours that the worker has not finished."""


W = TypeVar("W", bound=Loaded)
Policy = Callable[[Sequence[W]], W]


def _round_robin() -> Policy:
    turns = itertools.count()
    return lambda workers: workers[next(turns) % len(workers)]


def _least_load(workers: Sequence[W]) -> W:
    return min(workers, key=lambda worker: worker.num_in_flight)


def _power_of_two(workers: Sequence[W]) -> W:
    return workers[0] if len(workers) == 1 else _least_load(random.sample(workers, 2))


POLICIES: dict[str, Callable[[], Policy]] = {
    "random": lambda: random.choice,
    "round_robin": _round_robin,
    "passthrough": lambda: lambda workers: workers[0],
    "power_of_two": lambda: _power_of_two,
    "least_load": lambda: _least_load,
}
"""Makers of the policies, by the name of `--policy`."""
