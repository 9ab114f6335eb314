# SPDX-License-Identifier: MIT
"""Linear and embedding in float32 torch, from dense weights or blocks dequantised on the fly."""

from __future__ import annotations

import torch

from tokenspeed_kernel.quant.packed import (
    BLOCK_FORMATS,
    BLOCKS_LAYOUT,
    DENSE_FORMATS,
    ROUNDED_FORMATS,
    ROWS_LAYOUT,
    PackedWeight,
    Weight,
)
from tokenspeed_kernel.quant.reference import dequantize, dequantize_rows
from tokenspeed_kernel.quant.scaled import rounded_inputs
from tokenspeed_kernel.registry import Band, anywhere, kernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TRAITS = {
    "weight_format": (*DENSE_FORMATS, *BLOCK_FORMATS, *ROUNDED_FORMATS),
    "weight_layout": (ROWS_LAYOUT, BLOCKS_LAYOUT),
}


@kernel("gemm.linear", name="reference", needs=anywhere(), dtypes=_FLOATS, traits=_TRAITS, band=Band.REFERENCE)
def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply in float32 and round once."""
    dense = dequantize(weight) if isinstance(weight, PackedWeight) else weight.float()
    inputs = x.float()
    if isinstance(weight, PackedWeight) and weight.rounding is not None:
        values, scales = rounded_inputs(x, weight.rounding)
        inputs = values.float() * scales
    out = inputs @ dense.T
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


@kernel("gemm.heads", name="reference", needs=anywhere(), dtypes=_FLOATS, traits=_TRAITS, band=Band.REFERENCE)
def linear_heads(x: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
    """Multiply in float32 and round once."""
    dense = dequantize(weight) if isinstance(weight, PackedWeight) else weight.float()
    out.copy_(torch.einsum("thk,hnk->thn", x.float(), dense.unflatten(0, (x.shape[1], out.shape[2]))))


@kernel(
    "gemm.linear_silu_and_mul", name="reference", needs=anywhere(), dtypes=_FLOATS, traits=_TRAITS, band=Band.REFERENCE
)
def linear_silu_and_mul(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in float32, its activation, one rounding."""
    gate, up = linear(x.float(), weight, bias).chunk(2, dim=1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


@kernel("gemm.linear_add", name="reference", needs=anywhere(), dtypes=_FLOATS, traits=_TRAITS, band=Band.REFERENCE)
def linear_add(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """The sum in float32, one rounding."""
    return residual.copy_(residual.float() + linear(x.float(), weight, bias))


@kernel("gemm.logits", name="reference", needs=anywhere(), dtypes=_FLOATS, traits=_TRAITS, band=Band.REFERENCE)
def logits(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """The product in float32."""
    return linear(x.float(), weight, None)


@kernel("gemm.embedding", name="reference", needs=anywhere(), dtypes=_FLOATS, traits=_TRAITS, band=Band.REFERENCE)
def embedding(token_ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Gather the rows, dequantise only them."""
    index = token_ids.long()
    if isinstance(weight, PackedWeight):
        return dequantize_rows(weight.data[index], weight.format).to(dtype)
    return weight[index].to(dtype)
