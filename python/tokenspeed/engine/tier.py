# SPDX-License-Identifier: MIT
"""The loop's end of the tiers behind the device: hands the scheduler's transfers to the carrier, settles those that are
over. The loop's thread; nothing here waits but `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

import tokenspeed_cc
from tokenspeed.engine.arrivals import Transfers
from tokenspeed.engine.step_log import StepLog
from tokenspeed.kvstore import Moved, Order


class Tier(Protocol):
    """What the loop asks; `NO_TIER` where blocks live on the device only."""

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is under way."""

    def launch(self) -> None:
        """Start what the scheduler has ordered since the last call."""

    def take(self) -> list[Moved]:
        """Transfers that are over on all ranks."""

    def settle(self, moved: Sequence[Moved]) -> None:
        """Tell the scheduler, and start what follows from it."""

    def wait(self) -> None:
        """For a transfer's end, but not long."""


class NoTier:
    is_busy = False

    def launch(self) -> None:
        return

    def take(self) -> list[Moved]:
        return []

    def settle(self, moved: Sequence[Moved]) -> None:
        return

    def wait(self) -> None:
        return


NO_TIER = NoTier()


class HostTier:
    """start: of the carrier. block_bytes: of one block over all layers, for the metrics."""

    def __init__(
        self,
        scheduler: tokenspeed_cc.Scheduler,
        start: Callable[[Order], None],
        transfers: Transfers,
        log: StepLog,
        block_bytes: int,
    ) -> None:
        self._scheduler = scheduler
        self._start = start
        self._transfers = transfers
        self._log = log
        self._block_bytes = block_bytes
        self._under_way: dict[int, Order] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def launch(self) -> None:
        for transfer in self._scheduler.transfers():
            pairs = np.stack([transfer.device_blocks, transfer.host_blocks], axis=1)
            order = Order(transfer.transfer_id, transfer.kind == tokenspeed_cc.TRANSFER_STORE, pairs)
            self._under_way[order.transfer_id] = order
            self._start(order)

    def take(self) -> list[Moved]:
        return self._transfers.take()

    def settle(self, moved: Sequence[Moved]) -> None:
        for transfer in moved:
            order = self._under_way.pop(transfer.transfer_id)
            self._scheduler.settle_transfer(transfer.transfer_id, transfer.ok, -1)
            num_bytes = order.num_blocks * self._block_bytes if transfer.ok else None
            self._log.moved("to_host" if order.to_host else "to_device", num_bytes)
        self.launch()

    def wait(self) -> None:
        if self._under_way:
            self._transfers.wait()
