# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Writing keys and values, or latents and rotated keys, to their slots in Triton: one program a token (and KV head)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.quant.triton_fp8 import round_to, to_fp8
from tokenspeed_kernel.registry import Band, cuda, kernel


@triton.jit
def _store_row(
    row, inside, cache, at, scales, scale_at, SCALED: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """One head of one token, rounded to the cache's dtype."""
    if FP8:
        value = row.to(tl.float32)
        if SCALED:
            largest = tl.max(tl.abs(value), axis=0)
            scale = tl.where(largest > 0.0, tl.div_rn(largest, 448.0), 1.0)
            tl.store(scales + scale_at, scale)
            value = tl.div_rn(value, scale)
        tl.store(cache + at, to_fp8(value), mask=inside)
    else:
        tl.store(cache + at, round_to(row.to(tl.float32), cache.dtype.element_ty), mask=inside)


@triton.jit
def store_kv_kernel(
    k, v, k_cache, v_cache, k_scales, v_scales, slot_mapping, stride_kt, stride_kh, stride_vt, stride_vh,
    block_size, head_dim, num_kv_heads, SCALED: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy head h of token t to cache[slot // block_size, h, slot % block_size]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    column = tl.arange(0, BLOCK)
    inside = column < head_dim
    row = (slot // block_size * num_kv_heads + head) * block_size + slot % block_size
    at = row * head_dim + column
    key = tl.load(k + token * stride_kt + head * stride_kh + column, mask=inside, other=0.0)
    value = tl.load(v + token * stride_vt + head * stride_vh + column, mask=inside, other=0.0)
    _store_row(key, inside, k_cache, at, k_scales, row, SCALED, FP8)
    _store_row(value, inside, v_cache, at, v_scales, row, SCALED, FP8)


@kernel(
    "kvcache.store",
    name="triton",
    needs=cuda(8),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    band=Band.PORTABLE,
)
def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """One launch."""
    tokens, num_kv_heads, head_dim = k.shape
    if v.shape != k.shape or k_cache.shape[1::2] != (num_kv_heads, head_dim) or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"k and v [T, Hk, D] and caches [blocks, Hk, size, D] expected, got {k.shape}, {k_cache.shape}"
        )
    if k.stride(2) != 1 or v.stride(2) != 1 or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("heads of k and v must have adjacent elements, caches must be contiguous")
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    if fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_scales, v_scales = scales if scales is not None else (k_cache, v_cache)
    if tokens:
        store_kv_kernel[(tokens, num_kv_heads)](
            k, v, k_cache, v_cache, k_scales, v_scales, slot_mapping,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_cache.shape[2], head_dim, num_kv_heads,
            SCALED=scales is not None, FP8=fp8, BLOCK=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip


@triton.jit
def store_latent_kernel(
    latent, key, cache, slot_mapping, stride_latent, stride_key, latent_dim, key_dim,
    FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy both parts of token t to row slot of the cache."""
    token = tl.program_id(0).to(tl.int64)
    row = cache + tl.load(slot_mapping + token) * (latent_dim + key_dim)
    column = tl.arange(0, BLOCK)
    part = tl.load(latent + token * stride_latent + column, mask=column < latent_dim, other=0.0)
    _store_row(part, column < latent_dim, row, column, row, 0, False, FP8)
    part = tl.load(key + token * stride_key + column, mask=column < key_dim, other=0.0)
    _store_row(part, column < key_dim, row, latent_dim + column, row, 0, False, FP8)


@kernel(
    "kvcache.store_latent",
    name="triton",
    needs=cuda(8),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    traits={"kv_dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)},
    band=Band.PORTABLE,
)
def store_latent(latent: torch.Tensor, key: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """One launch."""
    tokens, latent_dim = latent.shape
    if latent_dim + key.shape[1] != cache.shape[2] or latent.stride(1) != 1 or key.stride(1) != 1:
        raise ValueError(f"latent [T, L] and key [T, W - L] must fill rows of {cache.shape}, elements adjacent")
    if not cache.is_contiguous():
        raise ValueError("the cache must be contiguous")
    fp8 = cache.dtype == torch.float8_e4m3fn
    if tokens:
        store_latent_kernel[(tokens,)](
            latent,
            key,
            cache.view(torch.uint8) if fp8 else cache,
            slot_mapping,
            latent.stride(0),
            key.stride(0),
            latent_dim,
            key.shape[1],
            FP8=fp8,
            BLOCK=triton.next_power_of_2(max(latent_dim, key.shape[1])),
            num_warps=2,
        )
