# SPDX-License-Identifier: MIT
"""Rotary position embedding (Su et al., 2021) in float32 torch, for both ways of pairing a head's elements."""

from __future__ import annotations

import torch

from tokenspeed_kernel.kvcache.reference import store_kv
from tokenspeed_kernel.registry import Band, anywhere, kernel
from tokenspeed_kernel.rope.heads import HeadNorms, Heads, Slots

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@kernel("rope.neox", name="reference", needs=anywhere(), dtypes=_FLOATS, band=Band.REFERENCE)
def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate the first rot_dim elements of every head in place; element i pairs with i + rot_dim / 2."""
    half = cos_sin.shape[1] // 2
    for heads in (q, k):
        _rotate(heads[..., :half], heads[..., half : 2 * half], cos_sin[positions])


@kernel("rope.gptj", name="reference", needs=anywhere(), dtypes=_FLOATS, band=Band.REFERENCE)
def rope_neighbours(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """The same where element 2 i pairs with 2 i + 1."""
    for heads in (q, k):
        rotated = heads[..., : cos_sin.shape[1]]
        _rotate(rotated[..., 0::2], rotated[..., 1::2], cos_sin[positions])


def _rotate(first: torch.Tensor, second: torch.Tensor, table: torch.Tensor) -> None:
    """Turn pairs of views [T, heads, rot_dim / 2] by rows [T, rot_dim] of the table."""
    cos, sin = table.float()[:, None, :].chunk(2, dim=-1)
    low, high = first.float(), second.float()
    turned = low * cos - high * sin, high * cos + low * sin  # both before the first write
    first.copy_(turned[0])
    second.copy_(turned[1])


@kernel("rope.norm_store", name="reference", needs=anywhere(), dtypes=_FLOATS, band=Band.REFERENCE)
def norm_rope_store(
    heads: Heads, norms: HeadNorms | None, positions: torch.Tensor, cos_sin: torch.Tensor, slots: Slots
) -> torch.Tensor:
    """Norm and rotation in float32, one rounding at the end."""
    q, k = heads.q.float(), heads.k.float()
    if norms is not None:
        q, k = _normed(q, norms.q_weight, norms.eps), _normed(k, norms.k_weight, norms.eps)
    rope(q, k, positions, cos_sin)
    v = heads.v.float()
    if slots.divisors is not None:
        k, v = k / slots.divisors[0], v / slots.divisors[1]
    store_kv(k, v, *slots[:4])
    return q.to(heads.q.dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
