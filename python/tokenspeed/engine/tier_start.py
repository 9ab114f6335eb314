# SPDX-License-Identifier: MIT
"""The host tier at start: how many blocks it has is decided before there is a scheduler, its memory and its thread come
after. Called by `core`, on the thread that loads. What cannot be had is an OutOfMemory that names the flag.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import tokenspeed_cc
from tokenspeed.config.flags import FlagError
from tokenspeed.config.hardware import available_ram_bytes
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.resolve import Config
from tokenspeed.config.tier import FolderConfig, TierConfig
from tokenspeed.engine import memory
from tokenspeed.engine.errors import OutOfMemory
from tokenspeed.engine.kv_pool import KVCaches
from tokenspeed.engine.loop import EngineLoop
from tokenspeed.engine.ranks import Ranks, first
from tokenspeed.engine.tier import HostTier
from tokenspeed.kvstore import Carrier, FileStore, HostArena, PinningFailed, Spaces, copier_for, lasting_space
from tokenspeed.layers.cache import LayerCache, total_block_bytes
from tokenspeed.version import __version__

_PUT_TIMEOUT_US = 10_000_000
_BACKOFF_US, _MAX_BACKOFF_US = 1_000_000, 60_000_000
_EXTRA_FLAG = "--kvstore-storage-backend-extra-config"
_OWN_BLOCK = np.zeros((1, 2), np.int32)
"""Block 0 of either side, which nobody reads."""


@dataclass(frozen=True)
class StartedTier:
    """`end` is for the loop."""

    end: HostTier
    carrier: Carrier
    arena: HostArena
    store: FileStore | None

    def close(self) -> None:
        """Once no step is in flight. May be called twice."""
        self.carrier.close()
        self.arena.close()
        if self.store is not None:
            for space in self.end.own_spaces:
                self.store.drop(space)


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


def scheduler_store(config: TierConfig | None) -> tokenspeed_cc.StoreConfig | None:
    """What the scheduler is told of the store; None: there is none."""
    if config is None or config.store is None:
        return None
    return tokenspeed_cc.StoreConfig(
        max_prefetches=16,
        max_puts=4,
        min_blocks=1,
        prefetch_timeout_us=int(config.store.wait_s * 1e6),
        put_timeout_us=_PUT_TIMEOUT_US,
        backoff_us=_BACKOFF_US,
        max_backoff_us=_MAX_BACKOFF_US,
    )


def start_tier(
    config: Config,
    num_blocks: int,
    caches: KVCaches,
    loop: EngineLoop,
    ranks: Ranks,
    files: Sequence[Path],
    facts: Sequence[object],
) -> StartedTier:
    """num_blocks: of the host. files: of the checkpoint; none: nobody else can know the weights. facts: of the model.

    Raises OutOfMemory, FlagError.
    """
    assert config.tier is not None
    flat = [tensor for layer in caches for tensor in layer]
    device = flat[0].device
    block_bytes = sum(tensor[0].nbytes for tensor in flat)
    arena = _arena(config.tier, num_blocks, block_bytes, device)
    copier = copier_for(flat, arena.rows, device, config.tier.by_kernel)
    for to_host in (True, False):  # whatever has to be compiled is compiled now
        copier.copy(_OWN_BLOCK, to_host)
    store = None if config.tier.store is None else _store(config.tier.store, block_bytes, ranks)
    shapes = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in flat]
    spaces = _spaces(config, files, [*facts, shapes], ranks) if store else Spaces(None, "")
    carrier = Carrier(copier, arena.rows.numpy(), store, ranks.transfers.add)
    if store is not None:
        ranks.transfers.clock = _now_us
    end = HostTier(loop.scheduler, carrier, ranks.transfers, loop.log, block_bytes, spaces)
    return StartedTier(end, carrier, arena, store)


def _arena(config: TierConfig, num_blocks: int, block_bytes: int, device: torch.device) -> HostArena:
    try:
        if device.type == "cpu":
            return HostArena(num_blocks, block_bytes)
        return HostArena.pinned(num_blocks, block_bytes, torch.cuda.cudart())
    except (MemoryError, PinningFailed) as error:
        what = str(error) or "no memory"
        raise OutOfMemory(f"{config.sizing_flag}: {what}; lower it, or raise the limit of locked memory") from None


def _store(config: FolderConfig, block_bytes: int, ranks: Ranks) -> FileStore:
    if 2 * block_bytes > config.max_bytes:
        raise FlagError(_EXTRA_FLAG, f"max_gb {config.max_bytes / 1e9:g}: a block has {block_bytes / 1e9:.3g} GB alone")
    try:
        return FileStore(Path(config.path), config.max_bytes, f"{ranks.group.rank}of{ranks.group.size}")
    except OSError as error:
        raise FlagError(_EXTRA_FLAG, f"{config.path}: {error.strerror or error}") from None


def _spaces(config: Config, files: Sequence[Path], facts: Sequence[object], ranks: Ranks) -> Spaces:
    run = ranks.agree("store", secrets.token_hex(8), first)
    if not files:
        return Spaces(None, run)
    param_path = config.kv_cache.param_path
    files = [*files, *([] if param_path is None else [Path(param_path)])]
    device = (config.device.device.partition(":")[0], config.device.dtype, config.memory.block_size)
    known = (__version__, device, config.kv_cache, config.loader.quantization, ranks.group.size)
    return Spaces(lasting_space(files, [*known, *facts]), run)


def checkpoint_files(source: ModelSource, load_format: str) -> list[Path]:
    """By which the weights are known; none where the files do not say what they are."""
    if load_format in ("dummy", "extensible"):
        return []
    return [source.path] if source.kind == "gguf" else [file for file in source.path.iterdir() if file.is_file()]


def _now_us() -> int:
    return time.monotonic_ns() // 1000
