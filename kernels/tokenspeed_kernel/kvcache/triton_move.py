# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Whole blocks between the device's caches and packed rows in pinned host memory, in Triton.

The device reads and writes the host's memory itself, so a transfer of any number of blocks is one launch a cache and
needs no room of its own on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.registry import Band, cuda, kernel

_WORDS = 2048
_LEAST_WORDS = 128


@triton.jit
def move_blocks_kernel(cache, packed, pairs, words, row_words, start, TO_PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a piece of one block of one cache; `start` is where the cache's part of a row begins."""
    pair = tl.program_id(0)
    block = tl.load(pairs + 2 * pair).to(tl.int64)
    row = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    in_cache = cache + block * words + word
    in_row = packed + row * row_words + start + word
    if TO_PACKED:
        tl.store(in_row, tl.load(in_cache, mask=inside), mask=inside)
    else:
        tl.store(in_cache, tl.load(in_row, mask=inside), mask=inside)


@kernel("kvcache.move_blocks", name="triton", needs=cuda(8), dtypes=(torch.uint8,), band=Band.PORTABLE)
def move_blocks(caches: list[torch.Tensor], packed: torch.Tensor, pairs: torch.Tensor, to_packed: bool) -> None:
    """One launch a cache. ValueError for rows whose bytes are not those of a block."""
    if packed.shape[1] != sum(cache.shape[1] for cache in caches) or not packed.is_contiguous():
        raise ValueError(f"a packed row must have the bytes of a block of all caches, got {packed.shape[1]}")
    rows, start = packed.view(torch.int64), 0
    for cache in caches:
        words = cache.shape[1] // 8
        size = max(_LEAST_WORDS, min(_WORDS, triton.next_power_of_2(words)))
        move_blocks_kernel[(pairs.shape[0], triton.cdiv(words, size))](
            cache.view(torch.int64), rows, pairs, words, rows.shape[1], start, TO_PACKED=to_packed, BLOCK=size
        )
        start += words
