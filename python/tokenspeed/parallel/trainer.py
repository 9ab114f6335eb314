# SPDX-License-Identifier: MIT
"""This rank's end of a process group with a trainer, who is its rank 0 and broadcasts tensors.

The trainer makes its end as `torch.distributed` makes any named group at a `tcp://` address: it holds the store, and
the keys in it are prefixed by the group's name as torch prefixes them. Ours is a group of its own beside whatever
groups the process has. A group that has failed once is of no use any more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import Backend, BackendConfig

# Its stubs know little of these classes.
dist: Any = torch.distributed

_POLL_S = 0.002
TRAINER = 0
"""The rank that sends."""


@dataclass(frozen=True)
class TrainerGroup:
    """Where a trainer waits. rank_offset: the rank of an engine's first rank. backend: "gloo" or "nccl"."""

    name: str
    host: str
    port: int
    rank_offset: int
    world_size: int
    backend: str


@dataclass(frozen=True)
class TensorFacts:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TrainerLink:
    """Joins at once, which takes until all are there. device: of this rank. Raises RuntimeError when somebody does not
    come within `timeout_s`, which also bounds what `receive` waits for."""

    def __init__(self, group: TrainerGroup, rank: int, device: torch.device, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._device = device if group.backend == "nccl" else torch.device("cpu")
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore(group.host, group.port, group.world_size, False, timeout=limit, wait_for_workers=True)
        where = next(iter(BackendConfig(Backend(group.backend)).get_device_backend_map()))
        for prefix in (group.name, f"{group.name}/", f"{where}/"):
            store = dist.PrefixStore(prefix, store)
        if group.backend == "nccl":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, group.world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, group.world_size, limit)

    def receive(self, facts: Sequence[TensorFacts]) -> list[torch.Tensor]:
        """Broadcasts in the order of `facts`, into the host's memory. Raises RuntimeError when the group fails."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        return [self._one(fact).to("cpu") for fact in facts]

    def receive_at_once(self, facts: Sequence[TensorFacts]) -> list[torch.Tensor]:
        """The same of tensors whose bytes come one behind the other, in one broadcast."""
        lengths = [math.prod(fact.shape) * fact.dtype.itemsize for fact in facts]
        (row,) = self.receive([TensorFacts("of all bytes", torch.uint8, (sum(lengths),))])
        # Copies, since a view of larger elements must begin at a multiple of their size.
        pieces = [piece.clone() for piece in torch.split(row, lengths)]
        return [piece.view(fact.dtype).reshape(fact.shape) for piece, fact in zip(pieces, facts)]

    def close(self) -> None:
        """Leave. May be called twice."""
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        self._group = None

    def _one(self, fact: TensorFacts) -> torch.Tensor:
        tensor = torch.empty(fact.shape, dtype=fact.dtype, device=self._device)
        if not tensor.numel():
            return tensor
        # Gloo moves bytes, and does not know every dtype.
        sent = tensor if self._device.type == "cuda" else tensor.view(-1).view(torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = TRAINER, 0
        work = self._group.broadcast([sent], options)
        deadline_s = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"tensor {fact.name!r} did not come within {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        work.wait()
        return tensor
