# SPDX-License-Identifier: MIT
"""Blocks and rows hold the same bytes, whichever way they go."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenspeed.kvstore import HostArena, MemoryCopies
from tokenspeed.kvstore.copier import copy_each, host_parts

Copy = Callable[[NDArray[np.int32], bool], None]
PAIRS = np.array([[2, 3], [5, 1]], np.int32)


def caches() -> list[torch.Tensor]:
    """Keys in fp8, their scales, latents."""
    return [
        torch.randn(6, 2, 8, 16).to(torch.float8_e4m3fn),
        torch.randn(6, 2, 8),
        torch.randn(6, 8, 24).to(torch.bfloat16),
    ]


def plain(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)


@pytest.mark.parametrize("direct", [False, True])
def test_what_went_to_the_host_comes_back_to_other_blocks(direct: bool) -> None:
    device = caches()
    arena = HostArena(4, sum(cache[0].nbytes for cache in device))
    before = [plain(cache).clone() for cache in device]
    copy: Copy = MemoryCopies(device, arena.rows).copy
    if direct:
        copy = functools.partial(copy_each, list(zip(device, host_parts(device, arena.rows))))
    copy(PAIRS, True)
    assert all(torch.equal(plain(cache), was) for cache, was in zip(device, before))
    for cache in device:
        plain(cache)[1:].zero_()
    copy(np.array([[4, 3], [1, 1]], np.int32), False)
    for cache, was in zip(device, before):
        assert torch.equal(plain(cache)[[4, 1]], was[[2, 5]])
        assert torch.equal(plain(cache)[0], was[0]) and not plain(cache)[[2, 3, 5]].any()
    assert not arena.rows[[0, 2, 4]].any()


def test_both_ways_of_copying_lay_rows_out_alike() -> None:
    device = caches()
    one, other = (HostArena(4, sum(cache[0].nbytes for cache in device)) for _ in range(2))
    MemoryCopies(device, one.rows).copy(PAIRS, True)
    copy_each(list(zip(device, host_parts(device, other.rows))), PAIRS, True)
    assert torch.equal(one.rows, other.rows) and one.rows[3].any()
