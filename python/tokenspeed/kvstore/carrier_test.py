# SPDX-License-Identifier: MIT
"""Orders are carried out in their order beside the caller, and each one's end is told."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenspeed.kvstore import Carrier, Moved, Order


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


def order(number: int, block: int, to_host: bool = True) -> Order:
    return Order(number, to_host, np.array([[block, 1]], np.int32))


def test_starting_waits_for_nothing_and_ends_are_told_in_order(caplog: pytest.LogCaptureFixture) -> None:
    copier, told = ScriptedCopier(), list[Moved]()
    carrier = Carrier(copier, told.append)
    carrier.start(order(1, 5))
    carrier.start(order(2, 13))
    carrier.start(order(3, 6, to_host=False))
    assert told == [] and copier.copied == []
    copier.go.set()
    carrier.close()
    carrier.close()
    assert told == [Moved(1, True), Moved(2, False), Moved(3, True)]
    assert copier.copied == [(5, True), (6, False)]
    assert "a transfer of 1 KV blocks failed: an unlucky block" in caplog.text
