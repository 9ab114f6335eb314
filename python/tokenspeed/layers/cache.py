# SPDX-License-Identifier: MIT
"""What a layer keeps of past tokens, declared by the model before there is memory for it.

The engine sizes its pool from the bytes of one block over all layers, allocates the tensors and hands them back in
`ForwardBatch.kv_caches`; only the layer that declared them knows what their axes mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.weights.kv_format import KVFormat


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a layer's cache, [num_blocks, *block_shape]."""

    block_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Zeroed, so that what a padding row reads is finite."""
        if device.type != "cpu":
            return torch.zeros((num_blocks, *self.block_shape), dtype=self.dtype, device=device)
        # numpy's zeros are pages that become real when first written; torch's are written here and now.
        pages = torch.from_numpy(np.zeros(num_blocks * self.block_bytes, np.uint8))
        return pages.view(self.dtype).view(num_blocks, *self.block_shape)


LayerCache = tuple[CacheTensor, ...]
"""All that one layer keeps."""


def paired_cache(num_kv_heads: int, block_size: int, head_dim: int, kv: KVFormat) -> LayerCache:
    """Keys and values, both [num_blocks, Hk, block_size, D]; with a scale for each head of each token, the scales of
    both too, float32 [num_blocks, Hk, block_size]."""
    tensor = CacheTensor((num_kv_heads, block_size, head_dim), kv.dtype)
    if not kv.per_token_head:
        return (tensor, tensor)
    scale = CacheTensor((num_kv_heads, block_size), torch.float32)
    return (tensor, tensor, scale, scale)


def latent_cache(block_size: int, width: int, dtype: torch.dtype) -> LayerCache:
    """One row a token for all heads, [num_blocks, block_size, width] (multi-head latent attention); of an fp8 one, all
    rows are divided by the layer's scale."""
    return (CacheTensor((block_size, width), dtype),)


def total_block_bytes(layers: Sequence[LayerCache]) -> int:
    """Bytes that one block of the pool takes over all layers."""
    return sum(tensor.block_bytes for layer in layers for tensor in layer)
