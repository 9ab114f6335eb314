# SPDX-License-Identifier: MIT
"""Products on Hopper whose outputs have the same bits alone and in any batch: one sum over K, in order, for each.

`cuda_stream` without shared K for few rows, `cuda_wide` for many; both add up panels of 64 columns in the same matrix
instructions. Chosen where only invariant solutions may be: elsewhere others rank above them.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.gemm import cuda_stream, cuda_wide
from tokenspeed_kernel.gemm.operands import dense_traits, even_eights
from tokenspeed_kernel.registry import Band, Platform, Requirement, kernel


def _both_built(platform: Platform) -> str | None:
    return cuda_stream.NEEDS.unmet(platform) or cuda_wide.NEEDS.unmet(platform)


def _some(tokens: int) -> bool:
    return tokens > 0


_NEEDS = Requirement("cuda", _both_built)
_LAST = -10


@kernel(
    "gemm.linear", name="cuda_invariant", needs=_NEEDS, dtypes={torch.bfloat16}, band=Band.PORTABLE,
    priority=_LAST, traits=dense_traits(_some), batch_invariant=True,
)  # fmt: skip
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias."""
    if x.shape[0] <= cuda_stream.MAX_TOKENS:
        return cuda_stream.linear(x, weight, bias, whole=True)
    return cuda_wide.linear(x, weight, bias)


@kernel(
    "gemm.linear_silu_and_mul", name="cuda_invariant", needs=_NEEDS, dtypes={torch.bfloat16}, band=Band.PORTABLE,
    priority=_LAST, traits=dense_traits(_some, even_eights), batch_invariant=True,
)  # fmt: skip
def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up over halves of x @ weight.T + bias."""
    if x.shape[0] <= cuda_stream.MAX_TOKENS:
        return cuda_stream.linear_silu_and_mul(x, weight, bias, whole=True)
    return cuda_wide.linear_silu_and_mul(x, weight, bias)


@kernel(
    "gemm.logits", name="cuda_invariant", needs=_NEEDS, dtypes={torch.bfloat16}, band=Band.PORTABLE,
    priority=_LAST, traits=dense_traits(_some), batch_invariant=True,
)  # fmt: skip
def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32."""
    if x.shape[0] <= cuda_stream.MAX_TOKENS:
        return cuda_stream.logits(x, weight, whole=True)
    return cuda_wide.logits(x, weight)
