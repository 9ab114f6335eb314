# SPDX-License-Identifier: MIT
"""What stays on the device between steps: the last token of every slot, and on a GPU a mirror of the block tables.

Owned by the runner; written only by the thread that launches, in the order of steps. The mirror follows the
scheduler's tables by the cells that each plan changed, so a step sends no tables. One slot more than the scheduler
has stands for the rows that pad a captured step: its table is block 0, which is never handed out.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class DeviceState:
    """For `num_slots` slots of the scheduler with `num_columns` blocks each at most."""

    def __init__(self, num_slots: int, num_columns: int, block_size: int, device: torch.device, mirrored: bool) -> None:
        self.device = device
        self.block_size = block_size
        self.num_columns = num_columns
        self.padding_slot = num_slots
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._tables = torch.zeros((num_slots + 1, num_columns), dtype=torch.int32, device=device) if mirrored else None

    @property
    def mirrored(self) -> bool:
        """Whether there is a mirror of the block tables."""
        return self._tables is not None

    @property
    def tables(self) -> torch.Tensor:
        """int32 [num_slots + 1, num_columns], by slot."""
        assert self._tables is not None
        return self._tables


def last_writes(updates: NDArray[np.int32], num_columns: int) -> NDArray[np.int32]:
    """Of (slot, column, block) writes in order, the last one of each cell: a device applies them in any order."""
    if len(updates) < 2:
        return np.array(updates)
    cells = updates[:, 0].astype(np.int64) * num_columns + updates[:, 1]
    _, from_the_end = np.unique(cells[::-1], return_index=True)
    return updates[len(updates) - 1 - from_the_end]
