# SPDX-License-Identifier: MIT
"""SwiGLU's activation on the CPU; the work is in csrc/cpu/elementwise.h."""

from __future__ import annotations

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.registry import Band, cpu, kernel


@kernel("activation.silu_and_mul", name="cpu", needs=cpu(), dtypes=(torch.float32,), band=Band.NATIVE)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half times the second. ValueError for an odd width."""
    num_tokens, both = x.shape
    if both % 2:
        raise ValueError(f"x must have gate and up side by side, got an odd width of {both}")
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty((num_tokens, both // 2))
    _cpu.silu_and_mul(x.data_ptr(), x.stride(0), num_tokens, both // 2, out.data_ptr())
    return out
