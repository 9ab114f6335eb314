# SPDX-License-Identifier: MIT
"""Carries out the scheduler's transfers on a thread of its own, one after the other, and says how each went.

The loop's thread hands orders over and never waits. What fails, fails as that transfer: nothing of it counts, the
scheduler rolls it back, and the next one is tried as if nothing had been.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from tokenspeed.kvstore.copier import Copier
from tokenspeed.kvstore.order import Moved, Order

logger = logging.getLogger("tokenspeed.engine")


class Carrier:
    """told: called on the carrier's thread when a transfer is over."""

    def __init__(self, copier: Copier, told: Callable[[Moved], None]) -> None:
        self.copier = copier
        self._told = told
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-tier", daemon=True)
        self._thread.start()

    def start(self, order: Order) -> None:
        """Carry it out some time after those before it."""
        self._orders.put(order)

    def close(self) -> None:
        """End once what was ordered is done. May be called twice."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self.copier.copy(order.pairs, order.to_host)
                ok = True
            except Exception as error:  # noqa: BLE001  (whatever the device says: this transfer's end, not the loop's)
                logger.warning("a transfer of %d KV blocks failed: %s", order.num_blocks, error)
                ok = False
            self._told(Moved(order.transfer_id, ok))
