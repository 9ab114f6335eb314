# SPDX-License-Identifier: MIT
"""Host arrays to device tensors. On the CPU they are the same memory; on a GPU one pinned copy carries a whole step.

Owned by the runner, called by the thread that launches. A pinned buffer is written again only after as many steps as
there are buffers, when the step that read it has long settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

_ALIGN = 64  # bytes; keeps every tensor of a pack aligned for vector loads
_LEAST_BYTES = 1 << 16
_DTYPES = {"<i4": torch.int32, "<i8": torch.int64}


class Transfer(Protocol):
    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Tensors of the arrays' dtypes and shapes, valid until this step has settled."""


def share_memory(arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """The CPU's transfer: none."""
    return [torch.from_numpy(array) for array in arrays]


class PinnedTransfer:
    """The GPU's: all arrays in one pinned buffer and one asynchronous copy. Waits for nothing."""

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._turn = 0

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        self._turn = (self._turn + 1) % len(self._buffers)
        sizes = [-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays]
        staging = self._staging(sum(sizes))
        staged, start = staging.numpy(), 0
        for array, size in zip(arrays, sizes):
            staged[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
            start += size
        pieces = staging.to(self._device, non_blocking=True).split(sizes)
        return [_typed(piece, array) for piece, array in zip(pieces, arrays)]

    def _staging(self, size: int) -> torch.Tensor:
        buffer = self._buffers[self._turn]
        if buffer.numel() < size:
            buffer = torch.empty(max(_LEAST_BYTES, 2 * size), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._buffers[self._turn] = buffer
        return buffer[:size]


def _typed(piece: torch.Tensor, array: NDArray[Any]) -> torch.Tensor:
    tensor = piece.view(_DTYPES[array.dtype.str])[: array.size]
    return tensor if array.ndim == 1 else tensor.view(array.shape)
