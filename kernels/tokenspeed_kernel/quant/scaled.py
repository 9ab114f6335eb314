# SPDX-License-Identifier: MIT
"""Making weights in the SCALED_FORMATS out of what checkpoints hold: values, scales and zero points apart.

Called while weights load, on the CPU. A scale that serves a whole tensor, a row, a tile of 128 x 128 or a group of
columns becomes one scale for each row's block of 32 or 128 values, so that whoever cuts a weight cuts its scales too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from tokenspeed_kernel.quant.packed import SCALED_FORMATS, InputRounding, PackedWeight

ScaledKind = Literal["fp8", "int8", "int4"]

FP8_MAX = 448.0
"""The largest e4m3 number."""


def block_size(num_columns: int, group_size: int) -> int | None:
    """Values of a block that fills rows of `num_columns` and stays within one scale's `group_size` columns."""
    for size in (128, 32):
        if num_columns % size == 0 and group_size % size == 0:
            return size
    return None


def scaled_weight(
    kind: ScaledKind,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    rounding: InputRounding | None = None,
) -> PackedWeight:
    """A weight scale * (value - zero) in blocks.

    values: [N, K]; float8_e4m3fn, int8, or for int4 uint8 in [0, 16).
    scales: [N, G] of any float dtype, G a divisor of K: one for K / G neighbouring columns.
    zeros: uint8 [N, G] for int4 only; None stands for 8.

    ValueError when no block size fits (see `block_size`).
    """
    num_columns = values.shape[1]
    return _packed(kind, values, scales, zeros, block_size(num_columns, num_columns // scales.shape[1]), rounding)


def in_blocks_of_32(weight: PackedWeight) -> PackedWeight:
    """The same weight in smaller blocks, which can be cut at more columns; other formats stay as they are."""
    if not weight.format.endswith("_b128"):
        return weight
    stored, scales, zeros = split_blocks(weight)
    kind: ScaledKind = "fp8" if weight.format[0] == "f" else "int8" if weight.format.startswith("int8") else "int4"
    if kind == "int4":
        halves = stored.view(weight.shape[0], -1, 64)
        values = torch.cat([halves & 15, halves >> 4], dim=2).reshape(weight.shape)
    else:
        values = stored.view(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    small = _packed(kind, values, scales, zeros, 32, weight.rounding)
    return replace(small, columns=weight.columns)


def _packed(
    kind: ScaledKind,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    size: int | None,
    rounding: InputRounding | None,
) -> PackedWeight:
    num_rows, num_columns = values.shape
    if size is None or scales.shape[0] != num_rows:
        raise ValueError(f"{tuple(scales.shape)} scales do not fit blocks of a {kind} weight {tuple(values.shape)}")
    num_blocks = num_columns // size
    repeats = num_blocks // scales.shape[1]
    parts = [_bytes(scales.float().repeat_interleave(repeats, dim=1).unsqueeze(2))]
    blocks = values.contiguous().view(num_rows, num_blocks, size)
    if kind == "int4":
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8) if zeros is None else zeros
        parts.append(zeros.repeat_interleave(repeats, dim=1).unsqueeze(2))
        low, high = blocks.chunk(2, dim=2)
        parts.append(low | high << 4)
    else:
        parts.append(_bytes(blocks))
    data = torch.cat(parts, dim=2).view(num_rows, -1)
    return PackedWeight(data, f"{kind}_b{size}", (num_rows, num_columns), rounding=rounding)


def split_blocks(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values uint8 [N, K] (int4: [N, K / 2], as in the blocks), scales float32 [N, blocks], zeros uint8 [N, blocks]."""
    num_values, num_bytes = SCALED_FORMATS[weight.format]
    blocks = weight.data.reshape(weight.shape[0], weight.shape[1] // num_values, num_bytes)
    scales = blocks[:, :, :4].contiguous().view(torch.float32).squeeze(2)
    if not weight.format.startswith("int4"):
        return blocks[:, :, 4:].reshape(weight.shape), scales, None
    return blocks[:, :, 5:].reshape(weight.shape[0], -1), scales, blocks[:, :, 4].contiguous()


def quantize_rows(dense: torch.Tensor, rounding: InputRounding | None) -> PackedWeight:
    """Dense [N, K] to fp8 with one scale a row, the largest magnitude / 448. ValueError as `scaled_weight`."""
    scales = row_scales(dense)
    values = (dense.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return scaled_weight("fp8", values, scales, rounding=rounding)


def row_scales(dense: torch.Tensor) -> torch.Tensor:
    """float32 [..., 1]: largest magnitude of the last axis / 448; 1 where all is zero."""
    largest = dense.float().abs().amax(dim=-1, keepdim=True)
    return torch.where(largest > 0, largest / FP8_MAX, 1.0)


def rounded_inputs(x: torch.Tensor, rounding: InputRounding) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as e4m3 [T, K] and scales float32 [T, 1], whose product it is about."""
    if rounding.scale is None:
        scales = row_scales(x)
    else:
        scales = torch.full((x.shape[0], 1), rounding.scale, dtype=torch.float32, device=x.device)
    return (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)
