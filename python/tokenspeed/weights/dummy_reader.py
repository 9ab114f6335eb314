# SPDX-License-Identifier: MIT
"""Random weights of the right shapes, for benchmarks without a checkpoint (`--load-format dummy`).

The same name and shape always give the same values, on every device. Matrices are slices of one pool of small normal
values, so that billions of weights cost a copy, not billions of draws; vectors (norms) are ones and biases zeros.
"""

from __future__ import annotations

import zlib

import torch

from tokenspeed.weights.reader import WeightReader
from tokenspeed_kernel.api import Weight

# A prime, so that rows of a wide matrix do not repeat each other.
_POOL_SIZE = 4_194_301
_STANDARD_DEVIATION = 0.02


class DummyReader(WeightReader):
    """Has every tensor that is asked for, made on `device`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        pool = torch.randn(_POOL_SIZE, generator=generator) * _STANDARD_DEVIATION
        self._pool = pool.to(dtype).to(device)
        self._dtype = dtype

    @property
    def num_tensors(self) -> int:
        return 0

    def has(self, name: str) -> bool:
        return True

    def where(self, name: str) -> str:
        return f"dummy weights: tensor {name!r}"

    def _names(self) -> set[str]:
        return set()

    def _fetch(self, name: str, shape: tuple[int, ...]) -> Weight:
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else 1.0
            return torch.full(shape, fill, dtype=self._dtype, device=self._pool.device)
        size, start = torch.Size(shape).numel(), zlib.crc32(name.encode()) % _POOL_SIZE
        if start + size <= _POOL_SIZE and self._pool.device.type == "cpu":
            return self._pool[start : start + size].view(shape)
        turned = self._pool.roll(-start)
        # A tensor of its own: kernels read weights in pieces of 16 bytes, and a slice may begin anywhere.
        weight = torch.empty(size, dtype=self._dtype, device=self._pool.device)
        copies = size // _POOL_SIZE
        weight[: copies * _POOL_SIZE].view(copies, _POOL_SIZE)[:] = turned
        weight[copies * _POOL_SIZE :] = turned[: size - copies * _POOL_SIZE]
        return weight.view(shape)
