# SPDX-License-Identifier: MIT
"""Which workers have caches that should be filled, and which requests are given to them for that.

A worker is cold while it is new, or from when it holds much less than the others (it was restarted, its index was
begun anew) until it has grown. Some of the prompts that nobody holds go to cold workers, and a few of those that
somebody holds: else a worker that lost its cache would stay idle where every prompt has a holder. Only workers whose
engines publish KV events are looked at: of others nobody knows what they hold. Owned by `CacheAware`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from tokenspeed.config.gateway_balance import WarmupConfig
from tokenspeed.gateway.route.policy import Loaded, W


class Warmup:
    """`clock` gives seconds as `Loaded.ready_s` has them."""

    def __init__(self, config: WarmupConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._thin_at: dict[str, int] = {}
        """Blocks of a worker when it became thin."""
        self._misses_owed = 0.0
        self._hits_since = 0
        self._mean_held = 0.0

    def for_miss(self, workers: Sequence[W]) -> W | None:
        """The worker to give a prompt that nobody holds, if it is a cold one's turn."""
        cold = self.cold(workers)
        if not cold:
            return None
        self._misses_owed += self._config.share
        if self._misses_owed < 1:
            return None
        self._misses_owed -= 1
        return min(cold, key=lambda worker: (worker.num_in_flight, worker.blocks.num_blocks))

    def for_hit(self, workers: Sequence[W], num_held: int) -> W | None:
        """The worker to give a prompt that another holds, if it is a thin one's turn: the next prompt of which less
        than usual is held, or any after twice the number. One at a time."""
        if not self._config.divert_every:
            return None
        self._mean_held += 0.1 * (num_held - self._mean_held)
        idle = [worker for worker in self._thin(workers) if not worker.num_in_flight]
        if not idle:
            return None
        self._hits_since += 1
        every = self._config.divert_every
        if self._hits_since < every or (num_held > self._mean_held and self._hits_since < 2 * every):
            return None
        self._hits_since = 0
        return min(idle, key=lambda worker: worker.blocks.num_blocks)

    def cold(self, workers: Sequence[W]) -> list[W]:
        """Workers that are new or thin."""
        newest_s = self._clock() - self._config.age_s
        thin = self._thin(workers)
        return [
            worker
            for worker in _followed(workers)
            if worker in thin or (worker.ready_s > newest_s and worker.blocks.num_blocks < self._config.blocks)
        ]

    def _thin(self, workers: Sequence[W]) -> list[W]:
        if not self._config.thin_ratio:
            return []
        followed = _followed(workers)
        if len(followed) < 2:
            return []
        median = statistics.median(worker.blocks.num_blocks for worker in followed)
        return [worker for worker in followed if self._is_thin(worker, median)]

    def _is_thin(self, worker: Loaded, median: float) -> bool:
        number = worker.blocks.num_blocks
        begun_at = self._thin_at.get(worker.url)
        if begun_at is None:
            if number and number >= self._config.thin_ratio * median:
                return False
            begun_at = number
        self._thin_at[worker.url] = min(begun_at, number)  # it may be emptied once more meanwhile
        if number - begun_at < self._config.blocks:
            return True
        del self._thin_at[worker.url]
        return False


def _followed(workers: Sequence[W]) -> list[W]:
    return [worker for worker in workers if worker.blocks.followed]
