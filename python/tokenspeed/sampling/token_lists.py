# SPDX-License-Identifier: MIT
"""A list of (token, number) for every slot, added to its logits: biases, and stop tokens that may not come yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_INITIAL_WIDTH = 8


class TokenLists:
    """ids int64 and values float32, both [num_slots, width] on the device, padded with (0, 0.0); width grows."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._ids = torch.zeros((num_slots, _INITIAL_WIDTH), dtype=torch.int64, device=device)
        self._values = torch.zeros((num_slots, _INITIAL_WIDTH), device=device)
        self._lengths = np.zeros(num_slots, np.int64)

    def set(self, slot: int, ids: Sequence[int], values: Sequence[float]) -> None:
        """Replace the slot's list."""
        if not ids and not self._lengths[slot]:
            return
        self._lengths[slot] = len(ids)
        width = self._ids.shape[1]
        if len(ids) > width:
            more = max(len(ids), 2 * width) - width
            self._ids = torch.nn.functional.pad(self._ids, (0, more))
            self._values = torch.nn.functional.pad(self._values, (0, more))
            width += more
        padding = width - len(ids)
        row_ids = torch.tensor([*ids, *[0] * padding], dtype=torch.int64)
        row_values = torch.tensor([*values, *[0.0] * padding], dtype=torch.float32)
        self._ids[slot].copy_(row_ids, non_blocking=True)
        self._values[slot].copy_(row_values, non_blocking=True)

    def add_to(
        self, logits: torch.Tensor, slots: torch.Tensor, host_slots: NDArray[np.int64], where: torch.Tensor | None
    ) -> None:
        """logits[row, id] += value for the lists of the rows' slots, only in rows where `where` (bool [S]) holds."""
        width = int(self._lengths[host_slots].max(initial=0))
        if width == 0:
            return
        ids, values = self._ids[slots, :width], self._values[slots, :width]
        if where is not None:
            values = torch.where(where[:, None], values, 0.0)
        logits.scatter_add_(1, ids, values)
