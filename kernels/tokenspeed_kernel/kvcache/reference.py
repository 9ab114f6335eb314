# SPDX-License-Identifier: MIT
"""Paged cache writes and block copies in plain torch."""

from __future__ import annotations

import torch

from tokenspeed_kernel.quant.scaled import FP8_MAX, row_scales
from tokenspeed_kernel.registry import Band, anywhere, kernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@kernel("kvcache.store", name="reference", needs=anywhere(), dtypes=_FLOATS, band=Band.REFERENCE)
def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """cache[slot // block_size, :, slot % block_size] = value, token by token."""
    block_size = k_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for index, (values, cache) in enumerate(((k, k_cache), (v, v_cache))):
        if scales is not None:
            factors = row_scales(values)
            scales[index][blocks, :, offsets] = factors.squeeze(2)
            values = values.float() / factors
        if cache.dtype == torch.float8_e4m3fn:
            # torch cannot scatter into this dtype, but into its bytes.
            codes = values.float().clamp(-FP8_MAX, FP8_MAX).to(cache.dtype)
            cache.view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)
        else:
            cache[blocks, :, offsets] = values.to(cache.dtype)


@kernel("kvcache.store_latent", name="reference", needs=anywhere(), dtypes=_FLOATS, band=Band.REFERENCE)
def store_latent(latent: torch.Tensor, key: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """cache[slot // block_size, slot % block_size] = latent, then key."""
    row = torch.cat([latent, key], dim=1)
    if cache.dtype == torch.float8_e4m3fn:
        cache, row = cache.view(torch.uint8), row.float().clamp(-FP8_MAX, FP8_MAX).to(cache.dtype).view(torch.uint8)
    cache[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]] = row.to(cache.dtype)


@kernel("kvcache.copy_blocks", name="reference", needs=anywhere(), dtypes=(*_FLOATS, torch.uint8), band=Band.REFERENCE)
def copy_blocks(caches: list[torch.Tensor], pairs: torch.Tensor) -> None:
    """All sources are read before any destination is written."""
    source, target = pairs[:, 0].long(), pairs[:, 1].long()
    for cache in caches:
        cache[target] = cache[source]


@kernel("kvcache.move_blocks", name="reference", needs=anywhere(), dtypes=(torch.uint8,), band=Band.REFERENCE)
def move_blocks(caches: list[torch.Tensor], packed: torch.Tensor, pairs: torch.Tensor, to_packed: bool) -> None:
    """One cache after the other, in words of eight bytes."""
    blocks, rows = pairs[:, 0].long(), pairs[:, 1].long().to(packed.device)
    at = 0
    for cache in caches:
        part = packed[:, at : at + cache.shape[1]].view(torch.int64)
        words = cache.view(torch.int64)
        if to_packed:
            part.index_copy_(0, rows, words.index_select(0, blocks).to(part.device))
        else:
            words.index_copy_(0, blocks, part.index_select(0, rows).to(words.device))
        at += cache.shape[1]
