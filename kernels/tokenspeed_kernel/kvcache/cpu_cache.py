# SPDX-License-Identifier: MIT
"""Writes into the paged KV cache and block copies on the CPU; the work is in csrc/cpu/kv_cache.cc."""

from __future__ import annotations

from typing import cast

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.registry import Band, cpu, kernel

# The numbers of KvFormat in csrc/cpu/kernels.h.
KV_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
KV_DTYPES = tuple(KV_CODES)
_ANY = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def cache_shape(k_cache: torch.Tensor, v_cache: torch.Tensor) -> _cpu.CacheShape:
    """Sizes and strides of a layer's two caches for the kernels. ValueError when they are not a pair of HND caches.

    Every layer of every step asks, so the answer is kept on the key cache, beside the value cache it holds for.
    """
    known = k_cache.__dict__.get("_cpu_cache_shape")
    if known is not None and known[0] is v_cache:
        return cast("_cpu.CacheShape", known[1])
    shape = _checked_shape(k_cache, v_cache)
    k_cache.__dict__["_cpu_cache_shape"] = (v_cache, shape)
    return shape


def _checked_shape(k_cache: torch.Tensor, v_cache: torch.Tensor) -> _cpu.CacheShape:
    num_blocks, num_heads, block_size, head_dim = k_cache.shape
    inner = (block_size * head_dim, head_dim, 1)
    k_stride, v_stride = k_cache.stride(), v_cache.stride()
    if v_cache.shape != k_cache.shape or k_stride[1:] != inner or v_stride[1:] != inner:
        raise ValueError(
            f"k_cache and v_cache must have one shape [num_blocks, Hk, block_size, D] with contiguous blocks, "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    code = KV_CODES.get(k_cache.dtype)
    if code is None or v_cache.dtype is not k_cache.dtype:
        raise ValueError(f"caches must be both of {KV_DTYPES}, got {k_cache.dtype} and {v_cache.dtype}")
    return _cpu.CacheShape(num_blocks, num_heads, block_size, head_dim, k_stride[0], v_stride[0], code)


def scale_addresses(k_cache: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[int, int]:
    """For the kernels; zeros when there are none. ValueError when they do not belong to the cache."""
    if scales is None:
        return 0, 0
    for scale in scales:
        if scale.shape != k_cache.shape[:3] or scale.dtype is not torch.float32 or not scale.is_contiguous():
            raise ValueError(
                f"scales of a cache {tuple(k_cache.shape)} must be contiguous float32 {tuple(k_cache.shape[:3])}, "
                f"got {scale.dtype} {tuple(scale.shape)}"
            )
    if k_cache.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"only a float8_e4m3fn cache has scales, this one is {k_cache.dtype}")
    return scales[0].data_ptr(), scales[1].data_ptr()


def latent_shape(cache: torch.Tensor) -> _cpu.CacheShape:
    """The same of a latent cache, as one KV head for both. ValueError when it is none."""
    known = cache.__dict__.get("_cpu_cache_shape")
    if known is not None:
        return cast("_cpu.CacheShape", known)
    num_blocks, block_size, width = cache.shape
    code = KV_CODES.get(cache.dtype)
    if cache.stride()[1:] != (width, 1) or code is None:
        raise ValueError(f"cache must be of {KV_DTYPES} with contiguous blocks, got {cache.dtype} {tuple(cache.shape)}")
    shape = _cpu.CacheShape(num_blocks, 1, block_size, width, cache.stride(0), cache.stride(0), code)
    cache.__dict__["_cpu_cache_shape"] = shape
    return shape


@kernel(
    "kvcache.store_latent",
    name="cpu",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits={"kv_dtype": KV_DTYPES},
    band=Band.NATIVE,
)
def store_latent(latent: torch.Tensor, key: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Copy both parts of each token's row, tokens in order. ValueError for a slot outside the cache."""
    shape = latent_shape(cache)
    num_tokens, latent_dim = latent.shape
    if key.shape != (num_tokens, shape.head_dim - latent_dim) or key.dtype is not torch.float32:
        raise ValueError(f"latent {tuple(latent.shape)} and {key.dtype} key {tuple(key.shape)} must fill a row")
    if latent.stride(1) != 1 or key.stride(1) != 1:
        raise ValueError("the elements of a token of latent and key must be adjacent")
    _check_slots(slot_mapping, num_tokens)
    _cpu.store_latent(
        latent.data_ptr(),
        latent.stride(0),
        latent_dim,
        key.data_ptr(),
        key.stride(0),
        num_tokens,
        cache.data_ptr(),
        shape,
        slot_mapping.data_ptr(),
    )


def _check_slots(slot_mapping: torch.Tensor, num_tokens: int) -> None:
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype is not torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be int64 [{num_tokens}], got {slot_mapping.dtype}")


@kernel(
    "kvcache.store",
    name="cpu",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits={"kv_dtype": KV_DTYPES},
    band=Band.NATIVE,
)
def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Copy each token's heads to its slot, tokens in order. ValueError for a slot outside the cache."""
    shape = cache_shape(k_cache, v_cache)
    num_tokens = k.shape[0]
    want = (num_tokens, shape.num_kv_heads, shape.head_dim)
    if k.shape != want or v.shape != want or v.dtype is not torch.float32:
        raise ValueError(f"k and v must be float32 {want}, got {tuple(k.shape)} and {v.dtype} {tuple(v.shape)}")
    k_stride, v_stride = k.stride(), v.stride()
    if k_stride[1:] != (shape.head_dim, 1) or v_stride[1:] != (shape.head_dim, 1):
        raise ValueError("the elements of a token of k and v must be adjacent")
    _check_slots(slot_mapping, num_tokens)
    _cpu.store_kv(
        k.data_ptr(),
        k_stride[0],
        v.data_ptr(),
        v_stride[0],
        num_tokens,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        scale_addresses(k_cache, scales),
        shape,
        slot_mapping.data_ptr(),
    )


@kernel("kvcache.copy_blocks", name="cpu", needs=cpu(), dtypes=_ANY, band=Band.NATIVE)
def copy_blocks(caches: list[torch.Tensor], pairs: torch.Tensor) -> None:
    """Copy whole blocks within each cache. ValueError for a block outside a cache."""
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype is not torch.int32:
        raise ValueError(f"pairs must be int32 [C, 2], got {pairs.dtype} {tuple(pairs.shape)}")
    pairs = pairs.contiguous()
    for cache in caches:
        if not cache.is_contiguous():
            raise ValueError("a cache must be contiguous to have its blocks copied")
        block_bytes = cache.stride(0) * cache.element_size()
        _cpu.copy_blocks(cache.data_ptr(), cache.shape[0], block_bytes, pairs.data_ptr(), pairs.shape[0])


@kernel("kvcache.move_blocks", name="cpu", needs=cpu(), dtypes=(torch.uint8,), band=Band.NATIVE)
def move_blocks(caches: list[torch.Tensor], packed: torch.Tensor, pairs: torch.Tensor, to_packed: bool) -> None:
    """On the calling thread, beside the steps. ValueError for what lies outside, or rows of another size."""
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype is not torch.int32:
        raise ValueError(f"pairs must be int32 [C, 2], got {pairs.dtype} {tuple(pairs.shape)}")
    if packed.shape[1] != sum(cache.shape[1] for cache in caches) or not packed.is_contiguous():
        raise ValueError(f"a packed row must have the bytes of a block of all caches, got {packed.shape[1]}")
    limits = torch.tensor([min(cache.shape[0] for cache in caches), packed.shape[0]], dtype=torch.int32)
    if bool((pairs < 0).any()) or bool((pairs >= limits).any()):
        raise ValueError(f"pairs hold a block or a row outside {limits.tolist()}")
    places = torch.tensor([(cache.data_ptr(), cache.shape[1]) for cache in caches])
    pairs = pairs.contiguous()
    _cpu.move_blocks(places.data_ptr(), len(caches), packed.data_ptr(), pairs.data_ptr(), pairs.shape[0], to_packed)
