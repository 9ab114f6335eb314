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
    """rank: ours, in [0, size). process_group: torch's handle, None for the default one or a group of one."""

    rank: int = 0
    size: int = 1
    process_group: Any = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, in place."""
        if self.size > 2 and not x.is_cuda:
            # gloo's order of additions depends on where in x an element lies, so it would depend on the batch.
            first, *others = self._gathered(x)
            x.copy_(first)
            for other in others:
                x.add_(other)
            return x
        self._torch_group().allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [T, n] side by side, by rank: [T, size * n]."""
        return torch.cat(self._gathered(x), dim=-1)

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Our columns of an x [T, size * n] that every rank holds: [T, n]."""
        width = x.shape[-1] // self.size
        return x[..., self.rank * width : (self.rank + 1) * width].contiguous()

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._torch_group().allgather([parts], [x.contiguous()]).wait()
        return parts

    def _torch_group(self) -> Any:
        return dist.group.WORLD if self.process_group is None else self.process_group
