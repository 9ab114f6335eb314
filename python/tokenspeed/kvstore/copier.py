# SPDX-License-Identifier: MIT
"""Copies of whole blocks between the device's caches and the host's rows. Whoever calls waits for the copy's end, so
that is a thread of its own, never the loop's.

`MemoryCopies` is the CPU's. On a GPU a stream of its own carries them, beside the steps: `KernelCopies` has the device
read and write the host's rows, a launch a cache; `DirectCopies` orders a copy for every block of every cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed_kernel import api

Caches = Sequence[torch.Tensor]
"""Tensors [num_blocks, ...], in the order in which their bytes stand in a row."""


class Copier(Protocol):
    """One thread at a time."""

    def copy(self, pairs: NDArray[np.int32], to_host: bool) -> None:
        """Copy blocks to rows or back; returns when it is done. pairs: int32 [n, 2], (device block, row).

        Raises whatever the device says; nothing may be assumed of what was to be written then.
        """


class MemoryCopies:
    """Device and host are the same memory."""

    def __init__(self, caches: Caches, rows: torch.Tensor) -> None:
        self._caches, self._rows = list(caches), rows

    def copy(self, pairs: NDArray[np.int32], to_host: bool) -> None:
        api.move_blocks(self._caches, self._rows, torch.from_numpy(pairs), to_host)


class KernelCopies:
    def __init__(self, caches: Caches, rows: torch.Tensor, device: torch.device) -> None:
        self._caches, self._rows = list(caches), rows
        self._lane = _SideStream(device)

    def copy(self, pairs: NDArray[np.int32], to_host: bool) -> None:
        with self._lane as device:
            api.move_blocks(self._caches, self._rows, torch.from_numpy(pairs).to(device), to_host)


class DirectCopies:
    def __init__(self, caches: Caches, rows: torch.Tensor, device: torch.device) -> None:
        self._parts = list(zip(caches, host_parts(caches, rows)))
        self._lane = _SideStream(device)

    def copy(self, pairs: NDArray[np.int32], to_host: bool) -> None:
        with self._lane:
            copy_each(self._parts, pairs, to_host)


def copy_each(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], pairs: NDArray[np.int32], to_host: bool) -> None:
    """Order a copy for every block of every cache. parts: (cache, its part of every row)."""
    for block, row in pairs.tolist():
        for cache, part in parts:
            if to_host:
                part[row].copy_(cache[block], non_blocking=True)
            else:
                cache[block].copy_(part[row], non_blocking=True)


def host_parts(caches: Caches, rows: torch.Tensor) -> list[torch.Tensor]:
    """Each cache's part of the rows, in the cache's dtype and shape: [num_rows, *block_shape]."""
    parts, start = [], 0
    for cache in caches:
        size = cache[0].nbytes
        part = rows[:, start : start + size].view(cache.dtype)
        parts.append(part.view(rows.shape[0], *cache.shape[1:]))
        start += size
    return parts


class _SideStream:
    """`with` it, what is launched goes to a stream beside the steps'; leaving waits for it, on this thread alone.

    No order with the steps' stream is needed: the scheduler lets nobody touch a block under a copy, and what a copy
    reads was written by steps that have settled.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __enter__(self) -> torch.device:
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()
        return self._device

    def __exit__(self, *failure: object) -> None:
        try:
            self._stream.synchronize()
        finally:
            self._context.__exit__(*failure)


def copier_for(caches: Caches, rows: torch.Tensor, device: torch.device, by_kernel: bool) -> Copier:
    """by_kernel: as `--kvstore-io-backend` says; on a CPU there is one way."""
    if device.type == "cpu":
        return MemoryCopies(caches, rows)
    return (KernelCopies if by_kernel else DirectCopies)(caches, rows, device)
