# SPDX-License-Identifier: MIT
"""The loop's end of the tiers behind the device: hands the scheduler's transfers to the carrier, settles those that are
over. The loop's thread; nothing here waits but `wait`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

import tokenspeed_cc
from tokenspeed.engine.arrivals import QUIET, News, Transfers
from tokenspeed.engine.step_log import StepLog
from tokenspeed.kvstore import Carrier, Move, Moved, Names, Order, Spaces

_WARM_UP = -1
_MOVES = {
    tokenspeed_cc.TRANSFER_STORE: Move.TO_HOST,
    tokenspeed_cc.TRANSFER_LOAD: Move.TO_DEVICE,
    tokenspeed_cc.TRANSFER_QUERY: Move.ASK_STORE,
    tokenspeed_cc.TRANSFER_GET: Move.FROM_STORE,
    tokenspeed_cc.TRANSFER_PUT: Move.TO_STORE,
}


class Tier(Protocol):
    """What the loop asks; `NO_TIER` where blocks live on the device only."""

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is under way."""

    def launch(self) -> None:
        """Start what the scheduler has ordered since the last call."""

    def take(self) -> News:
        """Transfers that are over on all ranks."""

    def settle(self, news: News) -> None:
        """Tell the scheduler, and start what follows from it."""

    def wait(self) -> None:
        """For a transfer's end, but not long."""

    def use_weights(self, version: int) -> None:
        """What is ordered from now on is of other weights."""


class NoTier:
    is_busy = False

    def launch(self) -> None:
        return

    def take(self) -> News:
        return QUIET

    def settle(self, news: News) -> None:
        return

    def wait(self) -> None:
        return

    def use_weights(self, version: int) -> None:
        return


NO_TIER = NoTier()


class HostTier:
    """block_bytes: of one block over all layers, for the metrics. spaces: of the store, by version of the weights;
    until `use_weights` is called, what is stored is for nobody later."""

    def __init__(
        self,
        scheduler: tokenspeed_cc.Scheduler,
        carrier: Carrier,
        transfers: Transfers,
        log: StepLog,
        block_bytes: int,
        spaces: Spaces,
    ) -> None:
        self._scheduler = scheduler
        self._carrier = carrier
        self._transfers = transfers
        self._log = log
        self._block_bytes = block_bytes
        self._spaces = spaces
        self._space = spaces.of(_WARM_UP)
        self.own_spaces = {self._space}
        """Of the store, that end with the run."""
        self._under_way: dict[int, Order] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def launch(self) -> None:
        for transfer in self._scheduler.transfers():
            if transfer.kind == tokenspeed_cc.TRANSFER_CANCEL:
                self._carrier.cancel(transfer.target)
                continue
            order = self._order_of(transfer)
            self._under_way[order.transfer_id] = order
            self._carrier.start(order)

    def _order_of(self, transfer: tokenspeed_cc.Transfer) -> Order:
        move, names = _MOVES[transfer.kind], None
        pairs = np.zeros((len(transfer.groups), 2), np.int32)
        if move is not Move.ASK_STORE:
            pairs[:, 1] = transfer.host_blocks
        if move in (Move.TO_HOST, Move.TO_DEVICE):
            pairs[:, 0] = transfer.device_blocks
        else:
            tokens = transfer.token_ids.reshape(len(pairs), -1)
            names = Names(self._space, transfer.hashes, transfer.parent_hashes, tokens)
        return Order(transfer.transfer_id, move, pairs, names)

    def take(self) -> News:
        return self._transfers.take()

    def settle(self, news: News) -> None:
        if news.now_us:
            self._scheduler.advance_clock(news.now_us)
        for moved in news.moved:
            order = self._under_way.pop(moved.transfer_id)
            done = None if moved.done is None else np.array(moved.done)
            self._scheduler.settle_transfer(moved.transfer_id, moved.ok, -1, done)
            self._count(order, moved)
        self.launch()

    def _count(self, order: Order, moved: Moved) -> None:
        if order.move is not Move.ASK_STORE:
            num_blocks = order.num_blocks if moved.done is None else sum(moved.done)
            self._log.moved(order.move.value, num_blocks * self._block_bytes if moved.ok else None)

    def wait(self) -> None:
        if self._under_way:
            self._transfers.wait()

    def use_weights(self, version: int) -> None:
        self._space = self._spaces.of(version)
        if self._spaces.is_own(self._space):
            self.own_spaces.add(self._space)
