# SPDX-License-Identifier: MIT
"""Policies that place a hash on a ring of workers: when a worker comes or goes, only the keys next to it move.

Every gateway with the same workers chooses alike, without a word between them.
"""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections.abc import Iterator, Sequence

from tokenspeed.gateway.route.policy import Asked, Choice, Overload, W, least_loaded

_POINTS = 160
"""Of each worker on the ring: shares differ by about a twelfth."""


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


class Ring:
    """The points of some workers, in order; made anew when the set of workers changes."""

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._points: list[tuple[int, int]] = []

    def walk(self, workers: Sequence[W], key: bytes) -> Iterator[W]:
        """All workers, each once, from the point of `key` on around the ring."""
        urls = tuple(worker.url for worker in workers)
        if urls != self._urls:
            self._urls = urls
            self._points = sorted(
                (_hash(f"{url}#{i}".encode()), n) for n, url in enumerate(urls) for i in range(_POINTS)
            )
        start, seen = bisect.bisect_left(self._points, (_hash(key), 0)), set[int]()
        for offset in range(len(self._points)):
            _, number = self._points[(start + offset) % len(self._points)]
            if number not in seen:
                seen.add(number)
                yield workers[number]


class PrefixHash:
    """Prompts with the same first `num_tokens` tokens go to the same worker, or to the next one on the ring that is
    not overloaded."""

    name = "prefix_hash"
    num_remembered = 0
    remembers = ""

    def __init__(self, num_tokens: int, overload: Overload) -> None:
        self._num_tokens = num_tokens
        self._overload = overload
        self._ring = Ring()

    def choose(self, workers: Sequence[W], asked: Asked) -> Choice[W]:
        """Branches: ring_hit, load_balance_walk (its workers are overloaded)."""
        key = array("I", asked.tokens[: self._num_tokens]).tobytes()
        for turn, worker in enumerate(self._ring.walk(workers, key)):
            if not self._overload.holds(worker, workers):
                return Choice(worker, "load_balance_walk" if turn else "ring_hit")
        raise AssertionError("some worker has no more than the mean load")

    def forget(self, url: str) -> None:
        """There is nothing to forget."""

    def num_keys(self, url: str) -> int:
        """It keeps no keys."""
        return 0


class ConsistentHashing:
    """Requests with the same routing key go to the same worker; those without one to the least loaded."""

    name = "consistent_hashing"
    num_remembered = 0
    remembers = ""

    def __init__(self) -> None:
        self._ring = Ring()

    def choose(self, workers: Sequence[W], asked: Asked) -> Choice[W]:
        """Branches: routing_key_hit, no_routing_key (the least loaded)."""
        if not asked.routing_key:
            return Choice(least_loaded(workers), "no_routing_key")
        key = asked.routing_key.encode("utf-8", "surrogateescape")  # a header may hold any bytes
        return Choice(next(self._ring.walk(workers, key)), "routing_key_hit")

    def forget(self, url: str) -> None:
        """There is nothing to forget."""

    def num_keys(self, url: str) -> int:
        """It keeps no keys."""
        return 0
