# SPDX-License-Identifier: MIT
"""What changes in the prefix cache, as numbered batches for whoever listens; who comes late gets the last of them, or
all that is cached.

`KvFeed.gather` belongs to the loop's thread; `KvLog.add`, `subscribe`, `subscribe_afresh` and their end may come from
any. Listeners are called in the order of the batches: they must not block, never raise, and not subscribe. Nothing is
recorded before `enable`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import tokenspeed_cc
from tokenspeed_cc import AllBlocksCleared, BlockRemoved, BlockStored

CacheChange = BlockStored | BlockRemoved | AllBlocksCleared

KEPT_BATCHES = 10_000


class KvBatch(NamedTuple):
    """What one turn of a replica's loop changed."""

    sequence: int
    timestamp_s: float
    changes: Sequence[CacheChange]
    data_rank: int


class KvContent(NamedTuple):
    """All that is cached once the batch `sequence` is taken (-1: before the first): by replica, parents first."""

    sequence: int
    blocks: dict[int, list[BlockStored]]


KvListener = Callable[[KvBatch], None]


class KvLog:
    """Numbers the batches of one replica or of several."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._enabled = False
        self._next_sequence = 0
        self._kept: deque[KvBatch] = deque(maxlen=KEPT_BATCHES)
        self._held: dict[int, dict[tuple[int, str], BlockStored]] = {}
        """By replica, what it caches: by hash and tier."""
        self._listeners: list[KvListener] = []
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        return self._enabled

    def enable(self) -> None:
        """Record from now on; nothing is cached yet."""
        self._enabled = True

    def add(self, timestamp_s: float, changes: Sequence[CacheChange], data_rank: int) -> None:
        """Take what a replica changed, and hand it to the listeners."""
        with self._lock:
            batch = KvBatch(self._next_sequence, timestamp_s, changes, data_rank)
            self._next_sequence += 1
            self._kept.append(batch)
            _apply(self._held.setdefault(data_rank, {}), changes)
            for listener in self._listeners:
                listener(batch)

    def subscribe(self, listener: KvListener) -> list[KvBatch]:
        """The batches that are kept; every later one is given to `listener`, in order."""
        with self._lock:
            self._listeners.append(listener)
            return list(self._kept)

    def subscribe_afresh(self, listener: KvListener) -> KvContent:
        """All that is cached; every later batch is given to `listener`, in order."""
        with self._lock:
            self._listeners.append(listener)
            held = {rank: list(blocks.values()) for rank, blocks in self._held.items()}
            sequence = self._next_sequence - 1
        return KvContent(sequence, {rank: _parents_first(blocks) for rank, blocks in held.items() if blocks})

    def unsubscribe(self, listener: KvListener) -> None:
        with self._lock:
            self._listeners.remove(listener)


class KvFeed(KvLog):
    """The log of this process's scheduler. data_rank: which replica it is."""

    def __init__(self, scheduler: tokenspeed_cc.Scheduler, block_size: int, data_rank: int) -> None:
        super().__init__(block_size)
        self._scheduler = scheduler
        self._data_rank = data_rank

    def enable(self) -> None:
        """On the loop's thread, or before it runs."""
        if not self._enabled:
            super().enable()
            self._scheduler.enable_kv_events()

    def gather(self) -> None:
        """Hand what has changed to the listeners."""
        if not self._enabled:
            return
        changes = self._scheduler.kv_events()
        if changes:
            self.add(time.time(), changes, self._data_rank)


def _apply(held: dict[tuple[int, str], BlockStored], changes: Iterable[CacheChange]) -> None:
    for change in changes:
        if isinstance(change, BlockStored):
            held[change.block_hash, change.medium] = change
        elif isinstance(change, BlockRemoved):
            held.pop((change.block_hash, change.medium), None)
        else:
            held.clear()


def _parents_first(blocks: list[BlockStored]) -> list[BlockStored]:
    """A block stored on another tier, or again, may stand behind its children."""
    by_hash: dict[int, list[BlockStored]] = {}
    for block in blocks:
        by_hash.setdefault(block.block_hash, []).append(block)
    ordered: list[BlockStored] = []
    for block in blocks:
        path: list[list[BlockStored]] = []
        ahead: int | None = block.block_hash
        while ahead is not None and ahead in by_hash:
            path.append(by_hash.pop(ahead))
            ahead = path[-1][0].parent_hash
        for copies in reversed(path):
            ordered += copies
    return ordered
