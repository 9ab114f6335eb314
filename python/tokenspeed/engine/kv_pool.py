# SPDX-License-Identifier: MIT
"""The memory of a GPU's KV blocks: a range of addresses first, the pages when their number is known.

Captured steps hold the caches' addresses before anybody knows how many blocks there will be. So addresses are reserved
for the most there could be, a first block gets memory for the captures to run on, and all of them once the number is
known; caches of any size start at the same addresses. Built once at start by `gpu_start`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.layers.cache import LayerCache
from tokenspeed_kernel.api import ReservedMemory

KVCaches = list[tuple[torch.Tensor, ...]]


class ReservedPool:
    """At most `most_blocks` of them."""

    def __init__(self, layers: Sequence[LayerCache], most_blocks: int, device: torch.device) -> None:
        self._layers = [
            [(tensor, ReservedMemory(most_blocks * tensor.block_bytes, device)) for tensor in layer] for layer in layers
        ]

    def grow(self, num_blocks: int) -> KVCaches:
        """Caches of `num_blocks` zeroed blocks; what was written to earlier ones stands. RuntimeError: no memory, and
        of what was asked for a part may be there."""
        for layer in self._layers:
            for tensor, memory in layer:
                memory.grow(num_blocks * tensor.block_bytes)
        return [
            tuple(memory.tensor((num_blocks, *tensor.block_shape), tensor.dtype) for tensor, memory in layer)
            for layer in self._layers
        ]

    def release(self) -> None:
        """Give all memory back; the addresses stay, for nobody to touch until `grow`."""
        for layer in self._layers:
            for _, memory in layer:
                memory.release()
