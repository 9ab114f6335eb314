# SPDX-License-Identifier: MIT
"""What our products on Hopper check of their operands, and how they hand them to the copy engine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from tokenspeed_kernel.quant.packed import ROWS_LAYOUT

Rule = Iterable[Hashable] | Callable[[Any], bool]


def whole_packs(inputs: int) -> bool:
    """Rows of whole 16 bytes of 2-byte floats."""
    return inputs % 8 == 0 and inputs > 0


def even_eights(outputs: int) -> bool:
    """Rows of a gate and of as many of up, each a multiple of eight."""
    return outputs % 16 == 0 and outputs > 0


def dense_traits(tokens: Rule, outputs: Rule = whole_packs) -> dict[str, Rule]:
    """Traits of a product of bfloat16 with dense bfloat16 weights."""
    return {
        "weight_format": {"bfloat16"},
        "weight_layout": {ROWS_LAYOUT},
        "tokens": tokens,
        "inputs": whole_packs,
        "outputs": outputs,
    }


def check_operands(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """ValueError where the copy engine could not read them."""
    tokens, inputs = x.shape
    stride = x.stride(0) if tokens > 1 else inputs
    if x.stride(1) != 1 or stride % 8 or weight.shape[1] != inputs or not weight.is_contiguous():
        raise ValueError(f"x [T, K] with rows of whole 16 bytes and contiguous weight [N, K] expected, got {x.shape}")
    if x.data_ptr() % 16 or weight.data_ptr() % 16 or (bias is not None and not bias.is_contiguous()):
        raise ValueError("x and weight must begin at multiples of 16 bytes, bias must be contiguous")


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """The tensor's memory, or null, as an argument of a launch."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def new_output(kind: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, N] for a product of kind "linear", [T, N / 2] for "gated", in float32 for "logits"."""
    outputs = weight.shape[0] // 2 if kind == "gated" else weight.shape[0]
    dtype = torch.float32 if kind == "logits" else x.dtype
    return torch.empty(x.shape[0], outputs, dtype=dtype, device=x.device)
