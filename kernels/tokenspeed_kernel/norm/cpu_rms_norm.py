# SPDX-License-Identifier: MIT
"""RMS norm on the CPU, alone or after the residual addition; the work is in csrc/cpu/elementwise.h."""

from __future__ import annotations

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.registry import Band, cpu, kernel


def _check_weight(weight: torch.Tensor, hidden: int) -> None:
    if weight.shape != (hidden,) or weight.dtype is not torch.float32 or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous float32 [{hidden}], got {weight.dtype} {tuple(weight.shape)}")


@kernel("norm.rms", name="cpu", needs=cpu(), dtypes=(torch.float32,), band=Band.NATIVE)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One pass for the sum of squares, one for the result. ValueError when the weight does not fit."""
    hidden = x.shape[-1]
    _check_weight(weight, hidden)
    rows = x if x.dim() == 2 else x.reshape(-1, hidden)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    _cpu.rms_norm(rows.data_ptr(), rows.stride(0), 0, 0, weight.data_ptr(), eps, rows.shape[0], hidden, out.data_ptr())
    return out


@kernel("norm.add_rms", name="cpu", needs=cpu(), dtypes=(torch.float32,), band=Band.NATIVE)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum is written into `residual`, which is returned. ValueError when shapes or dtypes disagree."""
    num_tokens, hidden = x.shape
    _check_weight(weight, hidden)
    if residual.shape != x.shape or residual.dtype is not torch.float32 or residual.stride(1) != 1:
        raise ValueError(
            f"residual must be float32 {tuple(x.shape)} with adjacent elements, "
            f"got {residual.dtype} {tuple(residual.shape)}"
        )
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _cpu.rms_norm(
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        weight.data_ptr(),
        eps,
        num_tokens,
        hidden,
        out.data_ptr(),
    )
    return out, residual
