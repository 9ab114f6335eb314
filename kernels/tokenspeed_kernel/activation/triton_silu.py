# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""SwiGLU's activation in Triton, one program a tile of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.registry import Band, cuda, kernel

_BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(x, out, inner, stride_x, BLOCK: tl.constexpr):
    """Row r of `out` is silu(x[r, :inner]) * x[r, inner:]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride_x + inner + column, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + column, product.to(out.dtype.element_ty), mask=inside)


@kernel(
    "activation.silu_and_mul",
    name="triton",
    needs=cuda(8),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    band=Band.PORTABLE,
)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """One launch."""
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"x must be [T, 2 * I] with adjacent elements, got {x.shape}")
    tokens, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, inner, dtype=x.dtype, device=x.device)
    if out.numel():
        silu_and_mul_kernel[(tokens, triton.cdiv(inner, _BLOCK))](x, out, inner, x.stride(0), BLOCK=_BLOCK, num_warps=4)
    return out
