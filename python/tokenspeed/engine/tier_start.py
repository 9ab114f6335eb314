# SPDX-License-Identifier: MIT
"""The host tier at start: how many blocks it has is decided before there is a scheduler, its memory and its thread come
after. Called by `core`, on the thread that loads. What cannot be had is an OutOfMemory that names the flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.config.hardware import available_ram_bytes
from tokenspeed.config.resolve import Config
from tokenspeed.config.tier import TierConfig
from tokenspeed.engine import memory
from tokenspeed.engine.errors import OutOfMemory
from tokenspeed.engine.kv_pool import KVCaches
from tokenspeed.engine.ranks import Ranks
from tokenspeed.engine.step_log import StepLog
from tokenspeed.engine.tier import HostTier
from tokenspeed.kvstore import Carrier, HostArena, PinningFailed, copier_for
from tokenspeed.layers.cache import LayerCache, total_block_bytes
from tokenspeed_cc import Scheduler

_OWN_BLOCK = np.zeros((1, 2), np.int32)
"""Block 0 of either side, which nobody reads."""


@dataclass(frozen=True)
class StartedTier:
    """`end` is for the loop."""

    end: HostTier
    carrier: Carrier
    arena: HostArena

    def close(self) -> None:
        """Once no step is in flight. May be called twice."""
        self.carrier.close()
        self.arena.close()


def num_host_blocks(config: Config, num_blocks: int, layers: Sequence[LayerCache], ranks: Ranks) -> int:
    """Of each rank; 0 without a tier. num_blocks: of the device. Raises OutOfMemory."""
    if config.tier is None:
        return 0
    block_bytes = total_block_bytes(layers)
    available = available_ram_bytes()
    neighbours = len(config.parallel.devices) * config.parallel.data_size
    share = available // neighbours
    if config.device.device == "cpu":
        share -= num_blocks * block_bytes  # whose pages are taken as they are written
    wanted = memory.num_host_blocks(config.tier, num_blocks, block_bytes, share)
    agreed: int = ranks.agree("host blocks", wanted, min)
    return agreed


def start_tier(
    config: TierConfig, num_blocks: int, caches: KVCaches, scheduler: Scheduler, ranks: Ranks, log: StepLog
) -> StartedTier:
    """num_blocks: of the host. Raises OutOfMemory."""
    flat = [tensor for layer in caches for tensor in layer]
    device = flat[0].device
    block_bytes = sum(tensor[0].nbytes for tensor in flat)
    try:
        if device.type == "cpu":
            arena = HostArena(num_blocks, block_bytes)
        else:
            arena = HostArena.pinned(num_blocks, block_bytes, torch.cuda.cudart())
    except (MemoryError, PinningFailed) as error:
        what = str(error) or "no memory"
        raise OutOfMemory(f"{config.sizing_flag}: {what}; lower it, or raise the limit of locked memory") from None
    copier = copier_for(flat, arena.rows, device, config.by_kernel)
    for to_host in (True, False):  # whatever has to be compiled is compiled now
        copier.copy(_OWN_BLOCK, to_host)
    carrier = Carrier(copier, ranks.transfers.add)
    return StartedTier(HostTier(scheduler, carrier.start, ranks.transfers, log, block_bytes), carrier, arena)
