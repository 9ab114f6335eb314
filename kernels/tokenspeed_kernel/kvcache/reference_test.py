# SPDX-License-Identifier: MIT
"""Cache writes land in the slot's block and offset; copies move whole blocks."""

from __future__ import annotations

import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.kvcache.reference import copy_blocks, store_kv


def test_slot_is_block_times_block_size_plus_offset() -> None:
    caches = torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    store_kv(k, v, *caches, torch.tensor([9, 3]), None)
    assert torch.equal(caches[0][2, :, 1], k[0])
    assert torch.equal(caches[1][0, :, 3], v[1])
    assert int((caches[0] != 0).sum()) == k.numel()


def test_copied_block_equals_its_source_and_others_stay() -> None:
    cache = torch.randn(4, 2, 4, 8)
    before = cache.clone()
    copy_blocks([cache], torch.tensor([[1, 3]], dtype=torch.int32))
    assert torch.equal(cache[3], before[1])
    assert torch.equal(cache[:3], before[:3])


def test_packed_rows_hold_a_block_of_every_cache_one_behind_the_other() -> None:
    caches = [torch.randn(5, 2, 4, 8), torch.randn(5, 2, 4).to(torch.float8_e4m3fn), torch.randn(5, 6)]
    packed = torch.zeros(4, 256 + 8 + 24, dtype=torch.uint8)
    pairs = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    api.move_blocks(caches, packed, pairs, to_packed=True)
    assert packed[1].numpy().tobytes() == b"".join(c[3].view(torch.uint8).numpy().tobytes() for c in caches)
    assert not packed[2:].any()
    emptied = [torch.zeros_like(cache) for cache in caches]
    api.move_blocks(emptied, packed, pairs, to_packed=False)
    for cache, back in zip(caches, emptied):
        assert torch.equal(back[3:].view(torch.uint8), cache[3:].view(torch.uint8))
        assert not back[:3].view(torch.uint8).any()
