# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""RMSNorm in Triton, one program a row, with or without the residual addition. The row stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.registry import Band, cuda, kernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HIDDEN = 32768


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, inner, stride_outer, stride_inner, hidden, eps, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """Row r is x[r // inner, r % inner]; with ADD the sum replaces `residual`, whose rows are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    at = row // inner * stride_outer + row % inner * stride_inner + column
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        there = residual + row * hidden + column
        values += tl.load(there, mask=inside, other=0.0).to(tl.float32)
        tl.store(there, values.to(residual.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / hidden + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


@kernel("norm.rms", name="triton", needs=cuda(8), dtypes=_FLOATS, band=Band.PORTABLE)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One launch; [T, H] or [T, heads, D] with strided tokens."""
    hidden = _check(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = x.shape[1] if x.dim() == 3 else 1
    strides = (x.stride(0), x.stride(1) if x.dim() == 3 else 0)
    if out.numel():
        block = triton.next_power_of_2(hidden)
        rms_norm_kernel[(x.numel() // hidden,)](
            x, x, weight, out, inner, *strides, hidden, eps, BLOCK=block, ADD=False, num_warps=_num_warps(block)
        )
    return out


@kernel("norm.add_rms", name="triton", needs=cuda(8), dtypes=_FLOATS, band=Band.PORTABLE)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch; `residual` becomes the sum."""
    hidden = _check(x, weight)
    if x.dim() != 2 or residual.shape != x.shape or not residual.is_contiguous():
        raise ValueError(f"x and residual must be [T, H], residual contiguous, got {x.shape} and {residual.shape}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(hidden)
        rms_norm_kernel[(x.shape[0],)](
            x, residual, weight, out, 1, x.stride(0), 0, hidden, eps, BLOCK=block, ADD=True, num_warps=_num_warps(block)
        )
    return out, residual


def _check(x: torch.Tensor, weight: torch.Tensor) -> int:
    hidden = x.shape[-1]
    if x.dim() not in (2, 3) or weight.shape != (hidden,) or not weight.is_contiguous():
        raise ValueError(f"x must be [T, H] or [T, heads, H] and weight [H], got {x.shape} and {weight.shape}")
    if x.stride(-1) != 1 or hidden > _MAX_HIDDEN:
        raise ValueError(f"elements of a row of x must be adjacent and at most {_MAX_HIDDEN}, got {hidden}")
    return hidden


def _num_warps(block: int) -> int:
    return max(1, min(16, block // 512))
