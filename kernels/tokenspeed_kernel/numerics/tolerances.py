# SPDX-License-Identifier: MIT
"""Allowed distance from the float32 reference, by operation and dtype.

An output element may be off by atol + rtol * |expected|. The reference reads the same rounded inputs, computes in
float32 and rounds once, so what is left is the solution's own summation order, its intermediate rounding, and one
unit in the last place of the output. Sums over K products grow with sqrt(K); `cases` keeps outputs near one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Absolute and relative bound on one output element."""

    atol: float
    rtol: float


_BY_DTYPE = {
    torch.float32: Tolerance(2e-5, 2e-5),
    torch.bfloat16: Tolerance(1e-2, 1e-2),
    torch.float16: Tolerance(2e-3, 2e-3),
}

# Flash attention rounds its probabilities to the values' dtype before the second product; torch rounds a split-K
# sum in bfloat16 more than once.
_BY_OP = {
    ("attention.paged", torch.bfloat16): Tolerance(2e-2, 2e-2),
    ("attention.paged", torch.float16): Tolerance(3e-3, 3e-3),
    ("attention.mla", torch.bfloat16): Tolerance(2e-2, 2e-2),
    ("attention.mla", torch.float16): Tolerance(3e-3, 3e-3),
    ("gemm.heads", torch.bfloat16): Tolerance(2e-2, 2e-2),
    ("gemm.linear", torch.float32): Tolerance(1e-4, 1e-4),
    ("gemm.linear", torch.bfloat16): Tolerance(2e-2, 2e-2),
    ("gemm.linear", torch.float16): Tolerance(4e-3, 4e-3),
    # Two products, with the activation between them rounded to the activations' dtype.
    ("moe.experts", torch.float32): Tolerance(1e-4, 1e-4),
    ("moe.experts", torch.bfloat16): Tolerance(3e-2, 3e-2),
    ("moe.experts", torch.float16): Tolerance(6e-3, 6e-3),
    ("gemm.linear_silu_and_mul", torch.float32): Tolerance(1e-4, 1e-4),
    ("gemm.linear_silu_and_mul", torch.bfloat16): Tolerance(2e-2, 2e-2),
    ("gemm.linear_silu_and_mul", torch.float16): Tolerance(4e-3, 4e-3),
    ("gemm.linear_add", torch.float32): Tolerance(1e-4, 1e-4),
    ("gemm.linear_add", torch.bfloat16): Tolerance(2e-2, 2e-2),
    ("gemm.linear_add", torch.float16): Tolerance(4e-3, 4e-3),
    ("gemm.logits", torch.float32): Tolerance(1e-4, 1e-4),
    ("gemm.logits", torch.bfloat16): Tolerance(2e-2, 2e-2),
    ("gemm.logits", torch.float16): Tolerance(4e-3, 4e-3),
    # Solutions may round between the norm and the rotation.
    ("rope.norm_store", torch.bfloat16): Tolerance(2e-2, 2e-2),
    ("rope.norm_store", torch.float16): Tolerance(4e-3, 4e-3),
}

_EXACT = Tolerance(0.0, 0.0)
_CACHE_OPS = {"kvcache.store", "kvcache.store_latent", "kvcache.copy_blocks", "kvcache.move_blocks"}
_EXACT_OPS = _CACHE_OPS | {"gemm.embedding", "sampling.sample"}


def tolerance(op: str, dtype: torch.dtype) -> Tolerance:
    """The bound for outputs of `dtype`; integers, and operations that only move values, must be exact."""
    if op in _EXACT_OPS or not dtype.is_floating_point:
        return _EXACT
    return _BY_OP.get((op, dtype), _BY_DTYPE[dtype])


def distance(actual: torch.Tensor, expected: torch.Tensor, bound: Tolerance) -> float:
    """Largest |actual - expected| / (atol + rtol |expected|): at most 1 is within bounds. NaN mismatches are inf."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if actual.numel() == 0 or torch.equal(actual, expected):
        return 0.0
    left, right = actual.double(), expected.to(actual.device).double()
    off = (left - right).abs()
    off[left == right] = 0.0  # equal infinities
    allowed = bound.atol + bound.rtol * right.abs()
    ratio = torch.where(off == 0, 0.0, off / allowed)
    return float(ratio.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
