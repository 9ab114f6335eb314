# SPDX-License-Identifier: MIT
"""Preparation for GPUs: packed weights become dense tensors of the activations' dtype, once, at load."""

from __future__ import annotations

import torch

from tokenspeed_kernel.quant.packed import PackedWeight, Weight
from tokenspeed_kernel.quant.reference import dequantize
from tokenspeed_kernel.registry import Band, cuda, kernel


@kernel(
    "quant.prepare",
    name="torch",
    needs=cuda(7),
    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.uint8),
    band=Band.PORTABLE,
)
def prepare(weight: Weight, device: torch.device, dtype: torch.dtype) -> Weight:
    """Copy first, dequantise on the device; dense weights keep their dtype unless the activations' differs."""
    if isinstance(weight, PackedWeight):
        there = PackedWeight(weight.data.to(device), weight.format, weight.shape, weight.layout)
        return dequantize(there).to(dtype)
    return weight.to(device=device, dtype=dtype).contiguous()
