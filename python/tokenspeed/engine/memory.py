# SPDX-License-Identifier: MIT
"""How many KV blocks there are: decided once, after the weights are loaded and a worst step has been measured.

Called once at start by `core`. It allocates nothing; it says what fits, and when nothing does, which flag to change.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tokenspeed.config.resolve import MemoryConfig, SchedulerLimits
from tokenspeed.config.tier import TierConfig
from tokenspeed.engine.errors import OutOfMemory

logger = logging.getLogger("tokenspeed.engine")

PADDING_BLOCKS = 1
"""Block 0 is never handed out."""


@dataclass(frozen=True)
class GpuParts:
    """What was measured. used_bytes: by weights, graphs and everybody else on the GPU; activation_bytes: of the widest
    step, which come and go."""

    total_bytes: int
    used_bytes: int
    activation_bytes: int

    def __str__(self) -> str:
        gib = [number / 2**30 for number in (self.total_bytes, self.used_bytes, self.activation_bytes)]
        return "of {:.1f} GiB, {:.1f} GiB are in use and a full step takes {:.1f} GiB".format(*gib)


def sizing_flag(config: MemoryConfig) -> str:
    """The flag that decides how large the pool is."""
    if config.num_tokens is not None:
        return "--max-total-tokens"
    return "--gpu-memory-utilization" if config.num_bytes is None else "--kv-cache-gib"


def num_kv_blocks(
    config: MemoryConfig, limits: SchedulerLimits, block_bytes: int, free_bytes: int, parts: GpuParts | None
) -> int:
    """Blocks of the device pool, block 0 included.

    block_bytes: of one block over all layers and everything that they keep.
    free_bytes: what the device has left for KV blocks, the share of `config` already applied.
    parts: of a GPU, for the message.
    Raises OutOfMemory when not even one block fits, or more is asked for than there is.
    """
    flag = sizing_flag(config)
    if config.num_tokens is not None:
        wanted = config.num_tokens // config.block_size
    elif config.num_bytes is not None:
        wanted = config.num_bytes // block_bytes
    else:
        # More than every running request at its longest, several times over for the prefix cache, is only waste.
        most = 4 * limits.max_num_seqs * -(-limits.max_model_len // config.block_size)
        wanted = min(free_bytes // block_bytes, most)
    if wanted < 1:
        why = f": {parts}" if parts else ""
        raise OutOfMemory(
            f"{flag}: there is no room for a KV block ({block_bytes / 2**20:.1f} MiB) in {free_bytes / 2**20:.1f} MiB"
            + why
        )
    if wanted * block_bytes > max(free_bytes, 0) and flag != "--gpu-memory-utilization":
        logger.warning(
            "%s asks for %.1f GiB of KV blocks; %.1f GiB is the share that would be taken by default",
            flag,
            wanted * block_bytes / 2**30,
            free_bytes / 2**30,
        )
    num_tokens = wanted * config.block_size
    if num_tokens < limits.max_model_len:
        logger.warning(
            "the KV pool holds %d tokens, less than the %d of --max-model-len: longer requests are refused",
            num_tokens,
            limits.max_model_len,
        )
    return wanted + PADDING_BLOCKS


def cpu_free_bytes(available_bytes: int, share: float) -> int:
    """The part of the available RAM that KV blocks may take."""
    return int(available_bytes * share)


def gpu_free_bytes(parts: GpuParts, share: float) -> int:
    """What is left of `share` of the GPU beside everything in use now and the widest step's activations."""
    return int(parts.total_bytes * share) - parts.used_bytes - parts.activation_bytes


def num_host_blocks(config: TierConfig, num_blocks: int, block_bytes: int, available_bytes: int) -> int:
    """Blocks of the host tier of one rank.

    num_blocks: of the device's pool, block 0 included. available_bytes: of host memory, for this rank.
    Raises OutOfMemory when not even one block fits, or more is asked for than there is.
    """
    if config.num_bytes is None:
        wanted, asked = int(config.ratio * (num_blocks - PADDING_BLOCKS)), f"{config.ratio:g} times the device's pool"
    else:
        wanted, asked = config.num_bytes // block_bytes, f"{config.num_bytes / 1e9:g} GB"
    if wanted < 1:
        raise OutOfMemory(f"{config.sizing_flag}: {asked} has no room for a KV block ({block_bytes / 2**20:.1f} MiB)")
    if wanted * block_bytes > available_bytes:
        raise OutOfMemory(
            f"{config.sizing_flag}: {asked} is {wanted * block_bytes / 2**30:.1f} GiB of host memory for each rank, "
            f"and {max(available_bytes, 0) / 2**30:.1f} GiB are available for it; lower it"
        )
    return wanted
