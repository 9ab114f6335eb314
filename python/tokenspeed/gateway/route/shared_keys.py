# SPDX-License-Identifier: MIT
"""The policy `manual` of one of several gateway processes: the table of routing keys is in the process in front.

A key's worker is asked for before the policy chooses, since that takes a message there and back; the choice itself is
made at once, as any policy's. Lives on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tokenspeed.gateway.route.policy import Asked, Choice, Loaded, W, least_loaded


@dataclass(frozen=True)
class KeyTold:
    """What the process in front says of a key: its worker, why, and the sizes of its table."""

    url: str
    branch: str
    num_remembered: int
    num_keys: dict[str, int] = field(default_factory=dict)
    """By worker."""


Ask = Callable[[str, list[tuple[str, int]]], Awaitable[KeyTold | None]]
"""A key and the workers that may take its request, each with its load; None: nobody answers."""


class SharedKeys:
    """`ask` reaches the table."""

    name = "manual"
    remembers = "manual_policy_cache_entries"

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._told = KeyTold("", "", 0)

    async def home(self, key: str, workers: Sequence[Loaded]) -> tuple[str, str]:
        """The URL of a key's worker, and the branch; empty where the table cannot be reached."""
        told = await self._ask(key, [(worker.url, worker.num_in_flight) for worker in workers])
        if told is None:
            return "", ""
        self._told = told
        return told.url, told.branch

    def choose(self, workers: Sequence[W], asked: Asked) -> Choice[W]:
        """Branches: those of `Manual`; the least loaded where there is no key, or no table."""
        url, branch = asked.home
        for worker in workers:
            if worker.url == url:
                return Choice(worker, branch)
        return Choice(least_loaded(workers), "no_routing_id")

    @property
    def num_remembered(self) -> int:
        """Keys of the table, as it was said last."""
        return self._told.num_remembered

    def num_keys(self, url: str) -> int:
        """Keys of a worker, as it was said last."""
        return self._told.num_keys.get(url, 0)

    def forget(self, url: str) -> None:
        """A worker keeps its keys."""
