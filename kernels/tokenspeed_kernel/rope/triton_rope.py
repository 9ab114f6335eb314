# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding in Triton, one program a token for all its query and key heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.registry import Band, cuda, kernel


@triton.jit
def _rotate(
    heads_ptr, stride_head, num_heads, half, cos, sin,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < num_heads) & (pair < half)
    low_at = heads_ptr + head * stride_head + (2 * pair if INTERLEAVED else pair)
    high_at = low_at + (1 if INTERLEAVED else half)
    low = tl.load(low_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(high_at, mask=inside, other=0.0).to(tl.float32)
    kind = heads_ptr.dtype.element_ty
    tl.store(low_at, (low * cos - high * sin).to(kind), mask=inside)
    tl.store(high_at, (high * cos + low * sin).to(kind), mask=inside)


@triton.jit
def rope_kernel(
    q,
    k,
    positions,
    cos_sin,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    num_heads,
    num_kv_heads,
    half,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Token t turns by the angles of table row positions[t]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF)
    row = cos_sin + tl.load(positions + token) * (2 * half)
    cos = tl.load(row + column, mask=column < half, other=0.0)[None, :]
    sin = tl.load(row + half + column, mask=column < half, other=0.0)[None, :]
    _rotate(q + token * stride_qt, stride_qh, num_heads, half, cos, sin, INTERLEAVED, HEADS, HALF)
    _rotate(k + token * stride_kt, stride_kh, num_kv_heads, half, cos, sin, INTERLEAVED, KV_HEADS, HALF)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@kernel("rope.neox", name="triton", needs=cuda(8), dtypes=_FLOATS, band=Band.PORTABLE)
def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """One launch; element i pairs with i + rot_dim / 2."""
    _launch(q, k, positions, cos_sin, False)


@kernel("rope.gptj", name="triton", needs=cuda(8), dtypes=_FLOATS, band=Band.PORTABLE)
def rope_neighbours(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """One launch; element 2 i pairs with 2 i + 1."""
    _launch(q, k, positions, cos_sin, True)


def _launch(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    rot_dim = cos_sin.shape[1]
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or rot_dim > q.shape[2] or rot_dim % 2:
        raise ValueError(f"q [T, Hq, D], k [T, Hk, D] and an even rot_dim <= D expected, got {q.shape}, {k.shape}")
    if q.stride(2) != 1 or k.stride(2) != 1 or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError("heads of q and k must have adjacent elements, cos_sin must be contiguous float32")
    if q.shape[0]:
        rope_kernel[(q.shape[0],)](
            q,
            k,
            positions,
            cos_sin,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            q.shape[1],
            k.shape[1],
            rot_dim // 2,
            INTERLEAVED=interleaved,
            HEADS=triton.next_power_of_2(q.shape[1]),
            KV_HEADS=triton.next_power_of_2(k.shape[1]),
            HALF=triton.next_power_of_2(rot_dim // 2),
            num_warps=4,
        )
