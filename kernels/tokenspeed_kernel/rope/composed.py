# SPDX-License-Identifier: MIT
"""Norm, rotation and cache write as the operations that they are made of, each by the solution that fits it."""

from __future__ import annotations

import torch

from tokenspeed_kernel.registry import Band, anywhere, kernel, ops, solve
from tokenspeed_kernel.rope.heads import HeadNorms, Heads, Slots


@kernel(
    "rope.norm_store",
    name="composed",
    needs=anywhere(),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    band=Band.PORTABLE,
)
def norm_rope_store(
    heads: Heads, norms: HeadNorms | None, positions: torch.Tensor, cos_sin: torch.Tensor, slots: Slots
) -> torch.Tensor:
    """Three or four launches; queries and, without norms, keys are rotated in place."""
    q, k, v = heads
    device, dtype, head_dim = q.device.type, q.dtype, q.shape[2]
    if norms is not None:
        norm = solve(ops.NORM_RMS, device, dtype, head_dim, norms.q_weight.dtype)
        q, k = norm(q, norms.q_weight, norms.eps), norm(k, norms.k_weight, norms.eps)
    solve(ops.ROPE_NEOX, device, dtype, head_dim, cos_sin.shape[1])(q, k, positions, cos_sin)
    store = solve(ops.KVCACHE_STORE, device, dtype, head_dim, slots.k_cache.shape[2], slots.k_cache.dtype)
    if slots.divisors is not None:
        k, v = k / slots.divisors[0], v / slots.divisors[1]
    store(k, v, *slots[:4])
    return q
