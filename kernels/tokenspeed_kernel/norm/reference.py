# SPDX-License-Identifier: MIT
"""RMSNorm (Zhang and Sennrich, 2019) in float32 torch."""

from __future__ import annotations

import torch

from tokenspeed_kernel.registry import Band, anywhere, kernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@kernel("norm.rms", name="reference", needs=anywhere(), dtypes=_FLOATS, band=Band.REFERENCE)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight in float32, round once."""
    values = x.float()
    scale = torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(x.dtype)


@kernel("norm.add_rms", name="reference", needs=anywhere(), dtypes=_FLOATS, band=Band.REFERENCE)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the float32 sum; the returned residual is that sum rounded to its dtype."""
    total = x.float() + residual.float()
    return rms_norm(total, weight, eps).to(x.dtype), total.to(residual.dtype)
