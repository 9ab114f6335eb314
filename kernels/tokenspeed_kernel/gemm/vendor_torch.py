# SPDX-License-Identifier: MIT
"""Dense products, products of fp8 with fp8, and look-ups on GPUs by torch, which calls cuBLAS and CUTLASS."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenspeed_kernel.quant.packed import (
    DENSE_FORMATS,
    ROUNDED_FORMATS,
    ROUNDED_LAYOUT,
    ROWS_LAYOUT,
    PackedWeight,
    Weight,
)
from tokenspeed_kernel.quant.scaled import rounded_inputs
from tokenspeed_kernel.registry import Band, cuda, kernel


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """cuBLAS."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """cuBLAS begins its sums with the residual."""
    torch.addmm(residual, x, weight.t(), out=residual)
    return residual if bias is None else residual.add_(bias)


def _register(op: str, fn: Callable[..., torch.Tensor], dtype: torch.dtype, priority: int) -> None:
    format = str(dtype).removeprefix("torch.")
    kernel(
        op,
        name=f"torch_{format}",
        needs=cuda(7),
        dtypes={dtype},
        traits={"weight_format": {format}, "weight_layout": {ROWS_LAYOUT}},
        band=Band.PORTABLE,
        priority=priority,
    )(fn)


for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    _register("gemm.linear", linear, _dtype, priority=0)
for _dtype in (torch.bfloat16, torch.float16):
    _register("gemm.linear_add", linear_add, _dtype, priority=1)


@kernel(
    "gemm.logits",
    name="torch_bfloat16",
    needs=cuda(8),
    dtypes={torch.bfloat16},
    traits={"weight_format": {"bfloat16"}, "weight_layout": {ROWS_LAYOUT}},
    band=Band.PORTABLE,
    priority=1,
)
def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """cuBLAS writes its float32 sums as they are."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


@kernel(
    "gemm.heads",
    name="torch",
    needs=cuda(7),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    traits={"weight_format": DENSE_FORMATS, "weight_layout": {ROWS_LAYOUT}},
    band=Band.PORTABLE,
)
def linear_heads(x: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
    """One batched product, heads as the batch."""
    assert isinstance(weight, torch.Tensor)  # held by the traits
    heads = weight.unflatten(0, (x.shape[1], out.shape[2]))
    if heads.dtype == x.dtype:
        torch.bmm(x.transpose(0, 1), heads.transpose(1, 2), out=out.transpose(0, 1))
    else:
        out.copy_(torch.bmm(x.transpose(0, 1), heads.transpose(1, 2).to(x.dtype)).transpose(0, 1))


@kernel(
    "gemm.linear",
    name="torch_fp8",
    needs=cuda(8, 9),
    dtypes={torch.bfloat16},
    traits={"weight_format": ROUNDED_FORMATS, "weight_layout": {ROUNDED_LAYOUT}},
    band=Band.PORTABLE,
)
def linear_fp8(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Inputs rounded to e4m3 token by token, products on the fp8 matrix units, one scale a token and one an output."""
    assert weight.rounding is not None and weight.scales is not None  # held by the traits
    values, scales = rounded_inputs(x, weight.rounding)
    return torch._scaled_mm(
        values, weight.data.T, scale_a=scales, scale_b=weight.scales[None, :], bias=bias, out_dtype=x.dtype
    )


@kernel(
    "gemm.embedding",
    name="torch",
    needs=cuda(7),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    traits={"weight_format": DENSE_FORMATS, "weight_layout": {ROWS_LAYOUT}},
    band=Band.PORTABLE,
)
def embedding(token_ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """One gather."""
    assert isinstance(weight, torch.Tensor)  # held by the traits
    return torch.nn.functional.embedding(token_ids, weight).to(dtype)
