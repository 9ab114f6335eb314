# SPDX-License-Identifier: MIT
"""Norm, rotation and cache write by our CUDA kernel csrc/cuda/norm_rope_store.cu: one launch."""

from __future__ import annotations

import ctypes

import torch

from tokenspeed_kernel.cuda_driver import CudaModule, fatbin_for
from tokenspeed_kernel.registry import Band, cuda, kernel
from tokenspeed_kernel.rope.heads import HeadNorms, Heads, Slots

_MODULE = CudaModule("norm_rope_store")
_SUFFIX = {torch.bfloat16: "bf16", torch.float16: "f16"}
_HEAD_DIMS = (64, 128, 256)
_MAX_WARPS = 8
_LANE_ELEMENTS = 16
_TURNS = 2


def cut(heads: int, head_dim: int) -> tuple[int, int]:
    """(blocks a token, warps a block): every warp has as many heads as fit its lanes, twice."""
    warps = -(-heads // heads_of_a_warp(head_dim))
    each = -(-warps // -(-warps // _MAX_WARPS))
    return -(-warps // each), each


def heads_of_a_warp(head_dim: int) -> int:
    """A lane holds 16 elements of a head."""
    return 32 * _LANE_ELEMENTS // head_dim * _TURNS


def norm_rope_store(
    heads: Heads, norms: HeadNorms | None, positions: torch.Tensor, cos_sin: torch.Tensor, slots: Slots
) -> torch.Tensor:
    """Queries are changed in place; keys of the projection are not."""
    if slots.scales is not None or slots.divisors is not None:
        raise ValueError("a cache in the heads' own dtype has no scales")
    q = heads.q
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = slots.k_cache.shape[1], slots.k_cache.shape[2]
    _check(heads, cos_sin, slots)
    suffix = _SUFFIX[q.dtype]
    weights: tuple[int | None, int | None] = (None, None)
    if norms is not None:
        weights = (norms.q_weight.data_ptr(), norms.k_weight.data_ptr())
        suffix += "_f32" if norms.q_weight.dtype == torch.float32 else ""
    if tokens:
        arguments = (
            *(ctypes.c_void_p(part.data_ptr()) for part in heads),
            *(ctypes.c_void_p(weight) for weight in weights),
            ctypes.c_float(norms.eps if norms is not None else 0.0),
            *(ctypes.c_void_p(part.data_ptr()) for part in (positions, cos_sin, *slots[:3])),
            *(ctypes.c_int(size) for size in (num_heads, num_kv_heads, block_size)),
            *(ctypes.c_int64(part.stride(0)) for part in heads),
        )
        blocks, warps = cut(num_heads + 2 * num_kv_heads, head_dim)
        function = f"norm_rope_store_{suffix}_{head_dim}"
        _MODULE.launch(function, q.device, tokens * blocks, 32 * warps, arguments)
    return q


def _check(heads: Heads, cos_sin: torch.Tensor, slots: Slots) -> None:
    head_dim = heads.q.shape[2]
    if any(part.stride()[1:] != (head_dim, 1) or part.stride(0) % 8 or part.data_ptr() % 16 for part in heads):
        raise ValueError("heads of a token must be adjacent, tokens must begin at multiples of 16 bytes")
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous float32, got {cos_sin.dtype}")
    if not all(part.is_contiguous() for part in slots[:3]) or slots.k_cache.shape[1::2] != (heads.k.shape[1], head_dim):
        raise ValueError(f"contiguous caches [blocks, Hk, size, D] expected, got {slots.k_cache.shape}")


def _register(dtype: torch.dtype, head_dim: int) -> None:
    kernel(
        "rope.norm_store",
        name=f"cuda_{_SUFFIX[dtype]}_{head_dim}",
        needs=cuda(8, also=fatbin_for("norm_rope_store")),
        dtypes={dtype},
        traits={"head_dim": {head_dim}, "rot_dim": {head_dim}, "kv_dtype": {dtype}},
        band=Band.NATIVE,
    )(norm_rope_store)


for _dtype in _SUFFIX:
    for _head_dim in _HEAD_DIMS:
        _register(_dtype, _head_dim)
