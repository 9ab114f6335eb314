# SPDX-License-Identifier: MIT
"""Orders are carried out in their order beside the caller, and each one's end is told."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenspeed.kvstore import Carrier, Move, Moved, Names, Order

ROWS = np.zeros((4, 8), np.uint8)
TOKENS = np.zeros((4, 16), np.int32)


class ScriptedCopier:
    """Waits for `go`; fails for blocks that are `bad`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.copied: list[tuple[int, bool]] = []

    def copy(self, pairs: NDArray[np.int32], to_host: bool) -> None:
        assert self.go.wait(60)
        if pairs[0, 0] == 13:
            raise RuntimeError("an unlucky block")
        self.copied.append((int(pairs[0, 0]), to_host))


def order(number: int, block: int, move: Move = Move.TO_HOST) -> Order:
    return Order(number, move, np.array([[block, 1]], np.int32), None)


def test_starting_waits_for_nothing_and_ends_are_told_in_order(caplog: pytest.LogCaptureFixture) -> None:
    copier, told = ScriptedCopier(), list[Moved]()
    carrier = Carrier(copier, ROWS, None, told.append)
    carrier.start(order(1, 5))
    carrier.start(order(2, 13))
    carrier.start(order(3, 6, Move.TO_DEVICE))
    assert told == [] and copier.copied == []
    copier.go.set()
    carrier.close()
    carrier.close()
    assert told == [Moved(1, True), Moved(2, False), Moved(3, True)]
    assert copier.copied == [(5, True), (6, False)]
    assert "a transfer of 1 KV blocks failed (to_host): an unlucky block" in caplog.text


class ScriptedStore:
    """Has the even ones of a question; counts what it is asked, and fails when it is `full`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.kept: list[int] = []
        self.full = False

    def has(self, names: Names, index: int) -> bool:
        return index % 2 == 0

    def get(self, names: Names, index: int, row: NDArray[np.uint8]) -> bool:
        row[:] = index + 1
        return index != 1

    def put(self, names: Names, index: int, row: NDArray[np.uint8]) -> None:
        assert self.go.wait(60)
        if self.full:
            raise OSError("no space left")
        self.kept.append(int(row[0]))


def stored(number: int, move: Move, rows: list[int]) -> Order:
    count = len(rows)
    names = Names("space", np.arange(count, dtype=np.uint64), np.arange(count, dtype=np.uint64), TOKENS[:count])
    return Order(number, move, np.array([[0, row] for row in rows], np.int32), names)


def test_blocks_go_between_rows_and_the_store_while_copies_go_on() -> None:
    copier, store, told = ScriptedCopier(), ScriptedStore(), queue.SimpleQueue[Moved]()
    rows = ROWS.copy()
    carrier = Carrier(copier, rows, store, told.put)
    carrier.start(stored(1, Move.ASK_STORE, [0, 0, 0]))
    assert told.get(timeout=60) == Moved(1, True, (True, False, True))
    carrier.start(stored(2, Move.FROM_STORE, [3, 1, 2]))
    assert told.get(timeout=60) == Moved(2, True, (True, False, True))
    assert rows[3, 0] == 1 and rows[2, 0] == 3
    carrier.start(stored(3, Move.TO_STORE, [2, 3]))
    copier.go.set()
    carrier.start(order(4, 5))
    assert told.get(timeout=60) == Moved(4, True), "no copy waits for the store"
    store.go.set()
    assert told.get(timeout=60) == Moved(3, True)
    assert store.kept == [3, 1]
    store.full = True
    carrier.start(stored(5, Move.TO_STORE, [2]))
    assert told.get(timeout=60) == Moved(5, False)
    carrier.close()


def test_what_is_cancelled_is_given_up_between_two_blocks() -> None:
    store, told = ScriptedStore(), queue.SimpleQueue[Moved]()
    carrier = Carrier(ScriptedCopier(), ROWS, store, told.put)
    carrier.start(stored(1, Move.TO_STORE, [1, 2, 3]))
    carrier.start(stored(2, Move.TO_STORE, [1, 2, 3]))
    carrier.cancel(1)
    carrier.cancel(2)
    store.go.set()
    assert [told.get(timeout=60), told.get(timeout=60)] == [Moved(1, False), Moved(2, False)]
    assert len(store.kept) <= 1
    carrier.close()
