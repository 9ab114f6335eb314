# SPDX-License-Identifier: MIT
"""What changes in the prefix cache, as numbered batches for whoever listens, and the last of them for who comes late.

`gather` belongs to the loop's thread, which calls the listeners: they must not block and never raise. `subscribe` and
its end may come from any thread. Nothing is recorded before `enable`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tokenspeed_cc

CacheChange = tokenspeed_cc.BlockStored | tokenspeed_cc.BlockRemoved | tokenspeed_cc.AllBlocksCleared

KEPT_BATCHES = 10_000


class KvBatch(NamedTuple):
    """What one turn of the loop changed."""

    sequence: int
    timestamp_s: float
    changes: Sequence[CacheChange]


KvListener = Callable[[KvBatch], None]


class KvFeed:
    def __init__(self, scheduler: tokenspeed_cc.Scheduler, block_size: int) -> None:
        self.block_size = block_size
        self._scheduler = scheduler
        self._enabled = False
        self._next_sequence = 0
        self._kept: deque[KvBatch] = deque(maxlen=KEPT_BATCHES)
        self._listeners: list[KvListener] = []
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        return self._enabled

    def enable(self) -> None:
        """Record from now on; on the loop's thread, or before it runs."""
        self._enabled = True
        self._scheduler.enable_kv_events()

    def gather(self) -> None:
        """Hand what has changed to the listeners."""
        if not self._enabled:
            return
        changes = self._scheduler.kv_events()
        if not changes:
            return
        batch = KvBatch(self._next_sequence, time.time(), changes)
        self._next_sequence += 1
        with self._lock:
            self._kept.append(batch)
            listeners = list(self._listeners)
        for listener in listeners:
            listener(batch)

    def subscribe(self, listener: KvListener) -> list[KvBatch]:
        """The batches that are kept; every later one is given to `listener`, in order."""
        with self._lock:
            self._listeners.append(listener)
            return list(self._kept)

    def unsubscribe(self, listener: KvListener) -> None:
        with self._lock:
            self._listeners.remove(listener)
