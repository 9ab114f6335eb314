# SPDX-License-Identifier: MIT
"""Preparation for GPUs, once, at load: scaled formats stay packed, GGUF's become dense in the activations' dtype."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenspeed_kernel.quant.packed import (
    ROUNDED_FORMATS,
    ROUNDED_LAYOUT,
    SCALED_FORMATS,
    SCALED_LAYOUT,
    PackedWeight,
    Weight,
)
from tokenspeed_kernel.quant.reference import dequantize
from tokenspeed_kernel.quant.scaled import split_blocks
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
        dense = dequantize(replace(weight, data=weight.data.to(device), rounding=None)).to(dtype)
        return dense if weight.columns is None else in_input_order(dense, weight.columns.to(device))
    return weight.to(device=device, dtype=dtype).contiguous()


@kernel(
    "quant.prepare",
    name="scaled",
    needs=cuda(8),
    dtypes=(torch.uint8,),
    traits={"weight_format": SCALED_FORMATS},
    band=Band.NATIVE,
)
def prepare_scaled(weight: PackedWeight, device: torch.device, dtype: torch.dtype) -> PackedWeight:
    """Values, scales and zeros apart, for kernels that read them in tiles; nothing is dequantised."""
    values, scales, zeros = split_blocks(weight)
    return replace(
        weight,
        data=values.to(device),
        layout=SCALED_LAYOUT,
        scales=scales.to(device),
        zeros=None if zeros is None else zeros.to(device),
        columns=None if weight.columns is None else weight.columns.to(device),
        rounding=None,
    )


@kernel(
    "quant.prepare",
    name="fp8_rows",
    needs=cuda(8, 9),
    dtypes=(torch.uint8,),
    traits={"weight_format": ROUNDED_FORMATS},
    band=Band.NATIVE,
)
def prepare_rows(weight: PackedWeight, device: torch.device, dtype: torch.dtype) -> PackedWeight:
    """One scale a row, for products of fp8 with fp8 in bfloat16; what does not fit these keeps its inputs."""
    values, scales, _ = split_blocks(weight)
    fits = dtype == torch.bfloat16 and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    if not fits or not torch.equal(scales, scales[:, :1].expand_as(scales)):
        return prepare_scaled(weight, device, dtype)
    data = values.to(device).view(torch.float8_e4m3fn)
    return replace(weight, data=data, layout=ROUNDED_LAYOUT, scales=scales[:, 0].contiguous().to(device))


def in_input_order(dense: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Columns where the inputs are that they multiply: column i of [N, K] goes to columns[i]."""
    return torch.empty_like(dense).index_copy_(1, columns, dense)
