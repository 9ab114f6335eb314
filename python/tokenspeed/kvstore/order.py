# SPDX-License-Identifier: MIT
"""What is carried out, and how it went: a transfer of the scheduler without the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Order:
    """A copy of KV blocks between device and host. pairs: int32 [n, 2], (device block, host block)."""

    transfer_id: int
    to_host: bool
    pairs: NDArray[np.int32]

    @property
    def num_blocks(self) -> int:
        return len(self.pairs)


@dataclass(frozen=True, slots=True)
class Moved:
    """How a transfer went; of several ranks, on all of them."""

    transfer_id: int
    ok: bool
