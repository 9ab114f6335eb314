# SPDX-License-Identifier: MIT
"""The ranks that split one tensor between them, and what they can do together.

A group of one does nothing and needs no `torch.distributed`. Larger ones wrap a process group (NCCL on GPUs, gloo on
CPUs, see `join`); every rank makes the same calls in the same order, on the thread that runs the model.
Every rank is left with the same bits: gathered parts are copies, and a sum is computed once and copied, or is of two
numbers, or is made on each rank in the order of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """rank: ours, in [0, size). process_group: torch's handle, None for the default one or a group of one. ordered:
    every sum is made in the order of ranks, so that no element's depends on where it lies or on how many there are."""

    rank: int = 0
    size: int = 1
    process_group: Any = None
    ordered: bool = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, in place."""
        if self.ordered and self.size > 2:
            first, *others = self._gathered(x)
            x.copy_(first)
            for other in others:
                x.add_(other)
            return x
        dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [T, n] side by side, by rank: [T, size * n]."""
        return torch.cat(self._gathered(x), dim=-1)

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Our columns of an x [T, size * n] that every rank holds: [T, n]."""
        width = x.shape[-1] // self.size
        return x[..., self.rank * width : (self.rank + 1) * width].contiguous()

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = list(x.new_empty((self.size, *x.shape)).unbind(0))
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return parts
