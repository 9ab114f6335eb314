# SPDX-License-Identifier: MIT
"""Random weights of the right shapes, for benchmarks without a checkpoint (`--load-format dummy`).

The same name and shape always give the same values, on every device. Matrices are slices of one pool of small normal
values, so that billions of weights cost a copy, not billions of draws; vectors (norms) are ones and biases zeros.
With fp8 quantization, projections are quantized as on loading a dense checkpoint; of other kinds they stay dense.
"""

from __future__ import annotations

import zlib

import torch

from tokenspeed.config.quantization import Quantization
from tokenspeed.weights.quantized_reader import is_projection
from tokenspeed.weights.reader import WeightReader
from tokenspeed_kernel.api import InputRounding, Weight, block_size, quantize_rows

# A prime, so that rows of a wide matrix do not repeat each other.
_POOL_SIZE = 4_194_301
_STANDARD_DEVIATION = 0.02


class DummyReader(WeightReader):
    """Has every tensor that is asked for, made on `device`."""

    def __init__(self, dtype: torch.dtype, device: torch.device, quantization: Quantization | None) -> None:
        super().__init__()
        self._quantization = quantization
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
        dense = self._dense(name, shape)
        group = self._quantization.group_of(name.rpartition(".")[0]) if self._quantization else None
        if (
            group is None
            or group.kind != "fp8"
            or not is_projection(name, shape)
            or block_size(shape[1], shape[1]) is None
        ):
            return dense
        return quantize_rows(dense, InputRounding(None) if group.rounds_inputs else None)

    def _dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
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
