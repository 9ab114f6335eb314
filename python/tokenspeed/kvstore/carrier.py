# SPDX-License-Identifier: MIT
"""Carries out the scheduler's transfers beside the loop, and says how each went.

Copies between device and host run on one thread, one after the other, transfers with the store on another, so that
nobody on the way to the device waits for a disk. The loop hands orders over and never waits. What fails, fails as that
transfer: nothing of it counts, the scheduler rolls it back, and the next one is tried as if nothing had been.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.kvstore.copier import Copier
from tokenspeed.kvstore.order import Move, Moved, Names, Order

logger = logging.getLogger("tokenspeed.engine")


class Store(Protocol):
    """Where blocks outlive the engine; `FileStore` is one. One thread at a time. All may raise OSError."""

    def has(self, names: Names, index: int) -> bool: ...
    def get(self, names: Names, index: int, row: NDArray[np.uint8]) -> bool:
        """Whether the block was there, whole and proven, and is in `row`, uint8 [block_bytes], now."""

    def put(self, names: Names, index: int, row: NDArray[np.uint8]) -> None: ...


class Carrier:
    """rows: the host's, uint8 [num_rows, block_bytes]. told: called when a transfer is over, on the thread that carried
    it out."""

    def __init__(
        self, copier: Copier, rows: NDArray[np.uint8], store: Store | None, told: Callable[[Moved], None]
    ) -> None:
        self.copier = copier
        self.store = store
        self._rows = rows
        self._told = told
        self._cancelled: set[int] = set()
        self._closing = False
        self._copies = _Worker("kv-tier", self._carry_out)
        self._with_store = None if store is None else _Worker("kv-store", self._carry_out)

    def start(self, order: Order) -> None:
        """Carry it out some time after those before it of its kind."""
        worker = self._copies if order.names is None else self._with_store
        assert worker is not None, "the scheduler knows of no store"
        worker.orders.put(order)

    def cancel(self, transfer_id: int) -> None:
        """Give a transfer with the store up soon; one that is over already is no matter."""
        self._cancelled.add(transfer_id)

    def close(self) -> None:
        """End once what is being copied is; what was ordered of the store and has not begun is given up. May be called
        twice."""
        self._closing = True
        self._copies.close()
        if self._with_store is not None:
            self._with_store.close()

    def _carry_out(self, order: Order) -> None:
        try:
            done = self._move(order)
            moved = Moved(order.transfer_id, done is not None, done or None)
        except Exception as error:  # noqa: BLE001  (whatever a device says: this transfer's end, not the loop's)
            logger.warning("a transfer of %d KV blocks failed (%s): %s", order.num_blocks, order.move.value, error)
            moved = Moved(order.transfer_id, False)
        self._cancelled.discard(order.transfer_id)
        self._told(moved)

    def _move(self, order: Order) -> tuple[bool, ...] | None:
        """What of it is done, by block, where that is asked; None when it was given up."""
        if order.names is None:
            self.copier.copy(order.pairs, order.move is Move.TO_HOST)
            return ()
        assert self.store is not None
        done = []
        for index, row in enumerate(order.pairs[:, 1].tolist()):
            if order.transfer_id in self._cancelled or self._closing:
                return None
            if order.move is Move.ASK_STORE:
                done.append(self.store.has(order.names, index))
            elif order.move is Move.FROM_STORE:
                done.append(self.store.get(order.names, index, self._rows[row]))
            else:
                self.store.put(order.names, index, self._rows[row])
        return tuple(done)


class _Worker:
    """A thread that does one order after the other."""

    def __init__(self, name: str, do: Callable[[Order], None]) -> None:
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._do = do
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self.orders.get()) is not None:
            self._do(order)
