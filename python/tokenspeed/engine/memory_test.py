# SPDX-License-Identifier: MIT
"""The size of the KV pool as a table."""

from __future__ import annotations

import pytest

from tokenspeed.config.resolve import MemoryConfig, SchedulerLimits
from tokenspeed.config.tier import TierConfig
from tokenspeed.engine.errors import OutOfMemory
from tokenspeed.engine.memory import GpuParts, cpu_free_bytes, gpu_free_bytes, num_host_blocks, num_kv_blocks

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


@pytest.mark.parametrize(
    ("ratio", "num_bytes", "expected"),
    [(2.0, None, 20), (0.55, None, 5), (2.0, 7 * BLOCK_BYTES + 9, 7), (0.0, BLOCK_BYTES, 1)],
)
def test_the_host_has_a_multiple_of_the_device_or_as_many_bytes_as_asked(
    ratio: float, num_bytes: int | None, expected: int
) -> None:
    assert num_host_blocks(TierConfig(ratio, num_bytes, True), 11, BLOCK_BYTES, 10**9) == expected


@pytest.mark.parametrize(
    ("ratio", "num_bytes", "available", "why"),
    [
        (0.05, None, 10**9, r"--kvstore-ratio: 0\.05 times the device's pool has no room for a KV block \(0\.0 MiB\)"),
        (0.0, 1000, 10**9, r"--kvstore-size: 1e-06 GB has no room for a KV block"),
        (1.0, None, 10 * BLOCK_BYTES - 1, "--kvstore-ratio: 1 times .* of host memory for each rank, and 0.0 GiB are"),
        (0.0, 10**9, -5, "--kvstore-size: 1 GB is 0.9 GiB of host memory for each rank, and 0.0 GiB are available"),
    ],
)
def test_a_host_with_no_room_names_the_flag(ratio: float, num_bytes: int | None, available: int, why: str) -> None:
    with pytest.raises(OutOfMemory, match=why):
        num_host_blocks(TierConfig(ratio, num_bytes, True), 11, BLOCK_BYTES, available)
