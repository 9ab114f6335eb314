# SPDX-License-Identifier: MIT
"""Host arrays to device tensors. On the CPU they are the same memory; on a GPU one pinned copy carries a whole step.

Owned by the runner, called by the thread that launches. A pinned buffer is written again only after as many steps as
there are buffers, when the step that read it has long settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGN = 8  # elements; keeps every tensor of a pack aligned for vector loads


class Transfer(Protocol):
    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Tensors of the arrays' dtypes and shapes, valid until this step has settled."""


def share_memory(arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """The CPU's transfer: none."""
    return [torch.from_numpy(array) for array in arrays]


class PinnedTransfer:
    """The GPU's: all arrays in one pinned buffer a dtype, one asynchronous copy each. Waits for nothing."""

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        self._device = device
        self._num_buffers = num_buffers
        self._buffers: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._turn = 0

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        self._turn = (self._turn + 1) % self._num_buffers
        tensors: list[torch.Tensor | None] = [None] * len(arrays)
        for dtype in {array.dtype for array in arrays}:
            members = [index for index, array in enumerate(arrays) if array.dtype == dtype]
            for index, tensor in zip(members, self._copy([arrays[index] for index in members])):
                tensors[index] = tensor
        return [tensor for tensor in tensors if tensor is not None]

    def _copy(self, arrays: list[NDArray[Any]]) -> list[torch.Tensor]:
        starts = np.cumsum([0] + [-(-array.size // _ALIGN) * _ALIGN for array in arrays])
        staging = self._staging(torch.from_numpy(arrays[0][:0]).dtype, int(starts[-1]))
        view = staging.numpy()
        for array, start in zip(arrays, starts):
            view[start : start + array.size] = array.ravel()
        device = staging[: int(starts[-1])].to(self._device, non_blocking=True)
        return [device[int(start) : int(start) + array.size].view(array.shape) for array, start in zip(arrays, starts)]

    def _staging(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        buffer = self._buffers.get((dtype, self._turn))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(max(1024, 2 * size), dtype=dtype, pin_memory=True)
            self._buffers[dtype, self._turn] = buffer
        return buffer
