# SPDX-License-Identifier: MIT
"""The size of the KV pool as a table."""

from __future__ import annotations

import pytest

from tokenspeed.config.resolve import MemoryConfig, SchedulerLimits
from tokenspeed.engine.errors import OutOfMemory
from tokenspeed.engine.memory import GpuParts, cpu_free_bytes, gpu_free_bytes, num_kv_blocks

LIMITS = SchedulerLimits(16, 4, 256, 512, True, 1, 256, True, ())
BLOCK_BYTES = 16 * 1024


def blocks(free_bytes: int, num_tokens: int | None = None, num_bytes: int | None = None) -> int:
    return num_kv_blocks(MemoryConfig(16, 0.5, num_tokens, num_bytes), LIMITS, BLOCK_BYTES, free_bytes, None)


@pytest.mark.parametrize(
    ("free_bytes", "num_tokens", "num_bytes", "expected"),
    [
        (10 * BLOCK_BYTES, None, None, 10),
        (10 * BLOCK_BYTES + BLOCK_BYTES - 1, None, None, 10),
        (10**12, None, None, 4 * 4 * 16),  # four times every running request at its longest
        (10**12, 160, None, 10),
        (10**12, 175, None, 10),
        (10**12, None, 5 * BLOCK_BYTES, 5),
        (BLOCK_BYTES, 1600, None, 100),  # what was asked for is taken at its word
    ],
)
def test_the_pool_is_what_fits_or_what_was_asked_and_one_block_for_padding(
    free_bytes: int, num_tokens: int | None, num_bytes: int | None, expected: int
) -> None:
    assert blocks(free_bytes, num_tokens, num_bytes) == expected + 1


@pytest.mark.parametrize(
    ("free_bytes", "num_bytes", "flag"),
    [
        (BLOCK_BYTES - 1, None, "--gpu-memory-utilization"),
        (-5, None, "--gpu-memory-utilization"),
        (10**9, 7, "--kv-cache-gib"),
    ],
)
def test_no_room_names_the_flag_to_change(free_bytes: int, num_bytes: int | None, flag: str) -> None:
    with pytest.raises(OutOfMemory, match=flag):
        blocks(free_bytes, num_bytes=num_bytes)


def test_shares_leave_the_rest_alone() -> None:
    assert cpu_free_bytes(1000, 0.25) == 250
    assert gpu_free_bytes(GpuParts(1000, 300, 100), 0.9) == 500


def test_a_full_gpu_is_told_what_takes_the_room() -> None:
    parts = GpuParts(total_bytes=140 * 2**30, used_bytes=130 * 2**30, activation_bytes=9 * 2**30)
    with pytest.raises(OutOfMemory, match=r"--gpu-memory-utilization.*130.0 GiB are in use and a full step takes 9.0"):
        num_kv_blocks(MemoryConfig(16, 0.98, None, None), LIMITS, BLOCK_BYTES, gpu_free_bytes(parts, 0.98), parts)
