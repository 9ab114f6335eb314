# SPDX-License-Identifier: MIT
"""The host's rows, and how a GPU's driver is asked for them."""

from __future__ import annotations

import pytest

from tokenspeed.kvstore import HostArena, PinningFailed


class Runtime:
    """Remembers what is registered; `status` is what it answers."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.status:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaError(self, status: int) -> int:
        return status

    def cudaGetErrorString(self, status: int) -> str:
        return {2: "out of memory"}[status]


def test_there_is_a_row_a_block_and_one_that_nobody_owns() -> None:
    arena = HostArena(5, 24)
    assert arena.rows.shape == (6, 24) and not arena.rows.any()
    arena.close()


def test_pinned_memory_is_registered_as_it_is_and_given_back_once() -> None:
    runtime = Runtime(0)
    arena = HostArena.pinned(5, 24, runtime)
    assert runtime.registered == {arena.rows.data_ptr(): 6 * 24}
    arena.close()
    arena.close()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_told_in_the_drivers_words() -> None:
    runtime = Runtime(2)
    with pytest.raises(PinningFailed, match=r"^2\.0 GiB of host memory cannot be pinned: out of memory$"):
        HostArena.pinned(2**21 - 1, 1024, runtime)
    assert not runtime.registered
