# SPDX-License-Identifier: MIT
"""A model's tensors in one range of addresses whose memory can be given back and had again under them.

Made right after loading, before anything holds an address (`core`); from then on captured steps may. The tensor objects
of the model stay the same, what they point at moves once, here. Weights that sleep may not be touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tokenspeed.models import parts_of
from tokenspeed_kernel.api import ReservedMemory

_ALIGN = 256
"""Bytes; as allocators of GPUs align, which kernels rely on."""
_CACHED = 1 << 30
"""Bytes of moved tensors that torch may hold back before it is told to let go."""


class Range(Protocol):
    """`ReservedMemory`, or what stands for it."""

    def grow(self, num_bytes: int) -> None: ...
    def release(self) -> None: ...
    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


class PlacedWeights:
    """model: anything `parts_of` walks; its tensors on `device` are moved. Tensors that share memory go on sharing it.

    Raises RuntimeError when the device has no room for the largest of them twice.
    """

    def __init__(
        self, model: object, device: torch.device, make_range: Callable[[int, torch.device], Range] = ReservedMemory
    ) -> None:
        shared: dict[int, list[torch.Tensor]] = {}
        for _, part in parts_of(model):
            if isinstance(part, torch.Tensor) and part.device.type == device.type and part.numel():
                shared.setdefault(part.untyped_storage().data_ptr(), []).append(part)
        sizes = [-(-parts[0].untyped_storage().nbytes() // _ALIGN) * _ALIGN for parts in shared.values()]
        self._num_bytes = sum(sizes)
        self._range = make_range(max(1, self._num_bytes), device)
        self._kept: torch.Tensor | None = None
        self._is_there = True
        start = moved = 0
        for size, key in zip(sizes, list(shared)):
            self._move(shared.pop(key), start, start + size)
            start, moved = start + size, moved + size
            if moved > _CACHED and device.type == "cuda":
                torch.cuda.empty_cache()
                moved = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def release(self, keep: bool) -> None:
        """Give the memory back, if it is there. keep: the values, in the host's memory."""
        if not self._is_there:
            return
        if keep:
            self._kept = self._bytes().to("cpu", copy=True)
        self._range.release()
        self._is_there = False

    def resume(self) -> None:
        """Have the memory again, with the values that were kept, else with none. Raises RuntimeError without room."""
        if self._is_there:
            return
        self._range.grow(max(1, self._num_bytes))
        self._is_there = True
        if self._kept is not None:
            self._bytes().copy_(self._kept)
            self._kept = None

    def _bytes(self) -> torch.Tensor:
        return self._range.tensor((self._num_bytes,), torch.uint8)

    def _move(self, parts: list[torch.Tensor], start: int, end: int) -> None:
        """All tensors of one storage."""
        self._range.grow(end)
        old = torch.empty(0, dtype=torch.uint8, device=parts[0].device).set_(parts[0].untyped_storage())
        new = self._range.tensor((end,), torch.uint8)[start:end]
        new[: old.numel()].copy_(old)
        for part in parts:
            typed = new[: new.numel() // part.element_size() * part.element_size()].view(part.dtype)
            part.data = typed.as_strided(part.shape, part.stride(), typed.storage_offset() + part.storage_offset())
