# SPDX-License-Identifier: MIT
"""What is carried out, and how it went: a transfer of the scheduler without the scheduler."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class Move(enum.Enum):
    """What a transfer does; the value is its name in metrics."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"
    ASK_STORE = "ask_store"
    FROM_STORE = "from_store"
    TO_STORE = "to_store"


@dataclass(frozen=True, slots=True)
class Names:
    """What n blocks stand for. hashes: uint64 [n], chained; parent_hashes: of the blocks before; token_ids: int32
    [n, block_size]. The hash finds, parent and tokens prove. space: blocks of other spaces have nothing to do with
    these."""

    space: str
    hashes: NDArray[np.uint64]
    parent_hashes: NDArray[np.uint64]
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Order:
    """pairs: int32 [n, 2], (device block, host block); with the store, the device's are 0, and to ask the host's too.
    names: of blocks that the store is asked for, gives or takes."""

    transfer_id: int
    move: Move
    pairs: NDArray[np.int32]
    names: Names | None

    @property
    def num_blocks(self) -> int:
        return len(self.pairs)


@dataclass(frozen=True, slots=True)
class Moved:
    """How a transfer went; of several ranks, on all of them. done: of a question or a get that went well, by block."""

    transfer_id: int
    ok: bool
    done: tuple[bool, ...] | None = None
