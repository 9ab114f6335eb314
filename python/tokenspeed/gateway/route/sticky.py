# SPDX-License-Identifier: MIT
"""The policy `manual`: a routing key stays with the worker that it was first given, until it has been idle for long.

A key remembers two workers: while its first one cannot take requests it goes to the second, and comes back later.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenspeed.gateway.route.policy import Asked, Choice, Policy, W, least_loaded

_HOMES = 2
_MAX_KEYS = 1_000_000
"""Clients choose the keys; beyond this many the one that was idle longest is forgotten."""


@dataclass
class _Entry:
    homes: list[str]
    used_s: float


class Manual:
    """`assignment`: how a new key gets its worker: random, min_load (fewest requests) or min_group (fewest keys).
    `clock` gives seconds that never go back."""

    name = "manual"
    remembers = "manual_policy_cache_entries"

    def __init__(self, idle_s: float, assignment: str, clock: Callable[[], float]) -> None:
        self._idle_s = idle_s
        self._assignment = assignment
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_keys: Counter[str] = Counter()

    @property
    def num_remembered(self) -> int:
        """Keys of the table."""
        return len(self._entries)

    def choose(self, workers: Sequence[W], asked: Asked) -> Choice[W]:
        """Branches: no_routing_id (the least loaded), occupied_hit, occupied_miss (its workers are gone), vacant."""
        now_s = self._clock()
        self._expire(now_s)
        if not asked.routing_key:
            return Choice(least_loaded(workers), "no_routing_id")
        entry = self._entries.setdefault(asked.routing_key, _Entry([], now_s))
        self._entries.move_to_end(asked.routing_key)
        entry.used_s = now_s
        known = {worker.url: worker for worker in workers}
        for url in entry.homes:
            if url in known:
                return Choice(known[url], "occupied_hit")
        branch = "occupied_miss" if entry.homes else "vacant"
        worker = self._assign(workers)
        self._settle(entry, worker.url)
        return Choice(worker, branch)

    def num_keys(self, url: str) -> int:
        """Keys that were given to a worker first or second."""
        return self._num_keys[url]

    def forget(self, url: str) -> None:
        """A worker that was lost keeps its keys: it comes back under the same name."""

    def _assign(self, workers: Sequence[W]) -> W:
        if self._assignment == "random":
            return random.choice(workers)
        if self._assignment == "min_group":
            return min(workers, key=lambda worker: (self._num_keys[worker.url], worker.num_in_flight))
        return min(workers, key=lambda worker: (worker.num_in_flight, self._num_keys[worker.url]))

    def _settle(self, entry: _Entry, url: str) -> None:
        entry.homes.append(url)
        self._num_keys[url] += 1
        if len(entry.homes) > _HOMES:
            self._num_keys[entry.homes.pop(0)] -= 1

    def _expire(self, now_s: float) -> None:
        while self._entries:
            entry = next(iter(self._entries.values()))
            if now_s - entry.used_s <= self._idle_s and len(self._entries) < _MAX_KEYS:
                return
            self._entries.popitem(last=False)
            self._num_keys.subtract(entry.homes)


Keys = Policy
"""A policy by routing keys: `Manual`, or one that asks where the table is."""


class StickyKeys:
    """Requests with a routing key stay with their worker; those without one go by another policy."""

    def __init__(self, policy: Policy, keys: Keys) -> None:
        self._policy, self._keys = policy, keys

    @property
    def name(self) -> str:
        """That of the policy beneath."""
        return self._policy.name

    @property
    def num_remembered(self) -> int:
        """What the policy beneath keeps."""
        return self._policy.num_remembered

    @property
    def remembers(self) -> str:
        """The same."""
        return self._policy.remembers

    def num_keys(self, url: str) -> int:
        """Keys of the table."""
        return self._keys.num_keys(url)

    def choose(self, workers: Sequence[W], asked: Asked) -> Choice[W]:
        """Branches: those of `Manual` for a key, else the policy's."""
        return (self._keys if asked.routing_key else self._policy).choose(workers, asked)

    def forget(self, url: str) -> None:
        """Told to both."""
        self._policy.forget(url)
        self._keys.forget(url)
