# SPDX-License-Identifier: MIT
"""Rotary embedding in place on the CPU; the work is in csrc/cpu/elementwise.h."""

from __future__ import annotations

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.registry import Band, cpu, kernel


@kernel("rope.neox", name="cpu", needs=cpu(), dtypes=(torch.float32,), band=Band.NATIVE)
def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate the first rot_dim elements of every head. ValueError for what does not fit, or a position out of range."""
    _rotate(q, k, positions, cos_sin, False)


@kernel("rope.gptj", name="cpu", needs=cpu(), dtypes=(torch.float32,), band=Band.NATIVE)
def rope_neighbours(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """The same for pairs of neighbours."""
    _rotate(q, k, positions, cos_sin, True)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    max_positions, rot_dim = cos_sin.shape
    if k.shape != (num_tokens, num_kv_heads, head_dim) or k.dtype is not torch.float32:
        raise ValueError(f"k must be float32 [{num_tokens}, Hk, {head_dim}], got {k.dtype} {tuple(k.shape)}")
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError("the elements of a head of q and k must be adjacent")
    if positions.shape != (num_tokens,) or positions.dtype is not torch.int64 or not positions.is_contiguous():
        raise ValueError(f"positions must be int64 [{num_tokens}], got {positions.dtype} {tuple(positions.shape)}")
    if rot_dim % 2 or rot_dim > head_dim or cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous float32 with an even width of at most {head_dim}")
    _cpu.rope(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        num_heads,
        k.data_ptr(),
        k.stride(0),
        k.stride(1),
        num_kv_heads,
        positions.data_ptr(),
        num_tokens,
        cos_sin.data_ptr(),
        max_positions,
        rot_dim,
        interleaved,
    )
