# SPDX-License-Identifier: MIT
"""Fused products as the operations that they are made of, each by the solution that fits it: invariant as those are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenspeed_kernel.gemm.signature import product_traits
from tokenspeed_kernel.quant.packed import Weight
from tokenspeed_kernel.registry import Band, Requirement, cpu, cuda, kernel, ops, solve

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def linear_silu_and_mul(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product, then the activation."""
    both = solve(ops.GEMM_LINEAR, x.device.type, x.dtype, *product_traits(x, weight))(x, weight, bias)
    out: torch.Tensor = solve(ops.ACTIVATION_SILU_AND_MUL, both.device.type, both.dtype)(both)
    return out


def linear_add(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """The product, then the sum."""
    return residual.add_(solve(ops.GEMM_LINEAR, x.device.type, x.dtype, *product_traits(x, weight))(x, weight, bias))


def logits(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """The product, rounded to x's dtype, then widened."""
    out: torch.Tensor = solve(ops.GEMM_LINEAR, x.device.type, x.dtype, *product_traits(x, weight))(x, weight, None)
    return out.float()


def _register(suffix: str, needs: Requirement, dtypes: tuple[torch.dtype, ...]) -> None:
    fused: dict[str, Callable[..., torch.Tensor]] = {
        "gemm.linear_silu_and_mul": linear_silu_and_mul,
        "gemm.linear_add": linear_add,
        "gemm.logits": logits,
    }
    for op, fn in fused.items():
        kernel(op, name=f"composed_{suffix}", needs=needs, dtypes=dtypes, band=Band.PORTABLE, batch_invariant=True)(fn)


_register("cpu", cpu(), (torch.float32,))
_register("cuda", cuda(7), _FLOATS)
