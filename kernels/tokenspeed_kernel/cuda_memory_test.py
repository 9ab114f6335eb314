# SPDX-License-Identifier: MIT
"""Reserved device memory against a driver that keeps books: addresses stay, memory comes and goes, nothing is lost."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch

from tokenspeed_kernel import cuda_memory
from tokenspeed_kernel.cuda_memory import ReservedMemory

GRANULE = 1 << 16
DEVICE = torch.device("cuda", 0)


class Books:
    """What a driver would hold. Addresses are real memory of the host, so that views of them can be read."""

    def __init__(self) -> None:
        self.ranges: dict[int, mmap.mmap] = {}
        self.created: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.room = 16 * GRANULE
        self.fails = ""

    def call(self, ordinal: int, name: str, *arguments: Any) -> None:
        if name == self.fails:
            raise RuntimeError(f"{name} failed: as told")
        getattr(self, name)(*arguments)

    def cuDeviceGet(self, *_: Any) -> None: ...

    def cuDeviceGetAttribute(self, *_: Any) -> None: ...

    def cuMemGetAllocationGranularity(self, granule: Any, *_: Any) -> None:
        granule._obj.value = GRANULE

    def cuMemAddressReserve(self, base: Any, size: Any, *_: Any) -> None:
        memory = mmap.mmap(-1, size.value)
        base._obj.value = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.ranges[base._obj.value] = memory

    def cuMemAddressFree(self, base: Any, size: Any) -> None:
        assert not self.mapped
        del self.ranges[base.value]

    def cuMemCreate(self, handle: Any, size: Any, *_: Any) -> None:
        if sum(self.created.values()) + size.value > self.room:
            raise RuntimeError("cuMemCreate failed: out of memory (2)")
        handle._obj.value = max(self.created, default=0) + 1
        self.created[handle._obj.value] = size.value

    def cuMemMap(self, where: Any, size: Any, _offset: Any, handle: Any, *_: Any) -> None:
        assert self.created[handle.value] == size.value and where.value not in self.mapped
        self.mapped[where.value] = (size.value, handle.value)
        ctypes.memset(where.value, 0xAB, size.value)  # new memory holds anything

    def cuMemSetAccess(self, where: Any, *_: Any) -> None:
        assert where.value in self.mapped
        self.accessible.add(where.value)

    def cuMemUnmap(self, where: Any, size: Any) -> None:
        assert self.mapped.pop(where.value)[0] == size.value
        self.accessible.discard(where.value)

    def cuMemRelease(self, handle: Any) -> None:
        assert handle.value not in [number for _, number in self.mapped.values()]
        del self.created[handle.value]

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, *_: Any) -> torch.Tensor:
        assert dtype == torch.uint8 and any(start <= address for start in self.accessible)
        buffer = (ctypes.c_ubyte * shape[0]).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    made = Books()
    monkeypatch.setattr(cuda_memory, "driver_call", made.call)
    monkeypatch.setattr(cuda_memory, "view_of_address", made.view)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    return made


def test_memory_that_was_given_back_returns_zeroed_at_the_same_addresses(books: Books) -> None:
    memory = ReservedMemory(4 * GRANULE, DEVICE)
    memory.grow(10)
    first = memory.tensor((3,), torch.int32)
    first[:] = 7
    memory.grow(3 * GRANULE)
    assert first.tolist() == [7, 7, 7] and memory.mapped_bytes == 3 * GRANULE and len(books.created) == 2
    for _ in range(2):
        memory.release()
        assert (books.created, books.mapped, memory.mapped_bytes) == ({}, {}, 0)
        with pytest.raises(ValueError, match="in 0 bytes of memory"):
            memory.tensor((1,), torch.uint8)
        memory.grow(3 * GRANULE)
        assert memory.tensor((3,), torch.int32).data_ptr() == first.data_ptr()
        assert first.tolist() == [0, 0, 0] and memory.tensor((3 * GRANULE,), torch.uint8).sum() == 0
        first[:] = 5
    memory.release()
    memory.release()
    del memory
    assert (books.ranges, books.created) == ({}, {})


@pytest.mark.parametrize("fails", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_growing_that_fails_leaves_what_was_there(books: Books, fails: str) -> None:
    memory = ReservedMemory(4 * GRANULE, DEVICE)
    memory.grow(GRANULE)
    memory.tensor((1,), torch.uint8)[:] = 9
    books.fails = fails
    with pytest.raises(RuntimeError, match=fails):
        memory.grow(4 * GRANULE)
    assert (len(books.created), len(books.mapped), memory.mapped_bytes) == (1, 1, GRANULE)
    books.fails = ""
    memory.grow(4 * GRANULE)
    assert memory.tensor((2,), torch.uint8).tolist() == [9, 0]
    del memory
    assert (books.ranges, books.created) == ({}, {})


def test_a_device_without_room_says_so_and_has_it_again_later(books: Books) -> None:
    memory, other = ReservedMemory(10 * GRANULE, DEVICE), ReservedMemory(10 * GRANULE, DEVICE)
    memory.grow(10 * GRANULE)
    memory.release()
    other.grow(10 * GRANULE)
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.grow(10 * GRANULE)
    other.release()
    memory.grow(10 * GRANULE)
    assert memory.mapped_bytes == 10 * GRANULE
