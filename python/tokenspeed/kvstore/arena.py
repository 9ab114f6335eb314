# SPDX-License-Identifier: MIT
"""The host tier's memory: a row a block, in it the block's bytes of every layer one behind the other.

Made once at start. On a CPU rows are plain memory that becomes real when it is first written. For a GPU all of it is
pinned, so that copies run beside the steps and the device reaches it by itself. Nobody but the copiers writes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_PORTABLE = 1


class PinningFailed(RuntimeError):
    """The host's memory cannot be pinned; the text says why."""


class HostArena:
    """Rows 1 to `num_blocks`; row 0 belongs to nobody, as block 0 of the device does.

    rows: uint8 [num_blocks + 1, block_bytes].
    """

    def __init__(self, num_blocks: int, block_bytes: int, unpin: Callable[[torch.Tensor], None] | None = None) -> None:
        pages = torch.from_numpy(np.zeros((num_blocks + 1) * block_bytes, np.uint8))
        self.rows = pages.view(num_blocks + 1, block_bytes)
        self._unpin = unpin

    @classmethod
    def pinned(cls, num_blocks: int, block_bytes: int, runtime: Any) -> HostArena:
        """Memory that a GPU reaches. runtime: `torch.cuda.cudart()`. Raises PinningFailed.

        Registered as it is: what torch allocates pinned is rounded up to a power of two.
        """

        def unpin(rows: torch.Tensor) -> None:
            runtime.cudaHostUnregister(rows.data_ptr())

        arena = cls(num_blocks, block_bytes, unpin)
        status = int(runtime.cudaHostRegister(arena.rows.data_ptr(), arena.rows.nbytes, _PORTABLE))
        if status:
            arena._unpin = None
            why = runtime.cudaGetErrorString(runtime.cudaError(status))
            raise PinningFailed(f"{arena.rows.nbytes / 2**30:.1f} GiB of host memory cannot be pinned: {why}")
        return arena

    def close(self) -> None:
        """Unpin; no copy may be under way. May be called twice."""
        if self._unpin is not None:
            self._unpin(self.rows)
            self._unpin = None
