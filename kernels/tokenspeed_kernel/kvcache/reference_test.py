# SPDX-License-Identifier: MIT
"""Cache writes land in the slot's block and offset; copies move whole blocks."""

from __future__ import annotations

import torch

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
