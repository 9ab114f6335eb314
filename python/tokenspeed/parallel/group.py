# SPDX-License-Identifier: MIT
"""The ranks that split one tensor between them, and what they can do together.

A group of one does nothing and needs no `torch.distributed`. Larger ones wrap a process group that whoever started
the ranks has initialised (NCCL on GPUs, gloo on CPUs); every rank makes the same calls in the same order, on the
thread that runs the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """rank: ours, in [0, size). process_group: torch's handle, None for the default one or a group of one."""

    rank: int = 0
    size: int = 1
    process_group: Any = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, in place."""
        dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [T, n] side by side, by rank: [T, size * n]."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=-1)

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Our columns of an x [T, size * n] that every rank holds: [T, n]."""
        width = x.shape[-1] // self.size
        return x[..., self.rank * width : (self.rank + 1) * width].contiguous()
