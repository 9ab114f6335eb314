# SPDX-License-Identifier: MIT
"""Packed weights lie side by side in large buffers, which go when the last of them does."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.quant.cpu_prepare import Arena


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_buffers_go_with_their_weights_and_keep_nothing_for_later() -> None:
    arena, before = Arena(), resident_bytes()
    weights = [arena.take(7 << 20).fill_(1) for _ in range(8)]
    assert resident_bytes() - before > 50 << 20
    del weights[1:]
    assert resident_bytes() - before < 40 << 20, "the first one's buffer stays"
    assert bool((weights.pop() == 1).all())
    gc.collect()
    assert resident_bytes() - before < 12 << 20


def test_small_weights_share_a_buffer_and_no_byte_of_it() -> None:
    arena = Arena()
    parts = [arena.take(size).fill_(size % 251) for size in (1, 64, 65, 4097, 100_000)]
    addresses = [part.data_ptr() for part in parts]
    assert all(address % 64 == 0 for address in addresses) and len(set(addresses)) == len(parts)
    assert all(bool((part == len(part) % 251).all()) for part in parts)
    assert api.prepare_weight(torch.randn(16, 16), "cpu").shape == (16, 16)
