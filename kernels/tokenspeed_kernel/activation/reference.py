# SPDX-License-Identifier: MIT
"""SwiGLU's activation (Shazeer, 2020) in float32 torch."""

from __future__ import annotations

import torch

from tokenspeed_kernel.registry import Band, anywhere, kernel


@kernel(
    "activation.silu_and_mul",
    name="reference",
    needs=anywhere(),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    band=Band.REFERENCE,
)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last axis."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)
