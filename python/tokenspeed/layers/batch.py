# SPDX-License-Identifier: MIT
"""What one step hands to a model: built by the engine's inputs, read by every layer, changed by none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_kernel.api import AttentionMetadata

__all__ = ["Attend", "AttentionMetadata", "ForwardBatch"]

Attend = Callable[[torch.Tensor, "ForwardBatch"], torch.Tensor]
"""Attention of queries [T, Hq, D] over the rows and caches of a batch: a contiguous [T, Hq, D]."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R rows, of which S are sampled from; all tensors on the model's device.

    token_ids: int64 [T]. positions: int64 [T], each token's index in its sequence.
    slot_mapping: int64 [T], where its keys and values go: block * block_size + offset.
    sample_indices: int64 [S], the tokens whose logits are wanted.
    attention: where rows lie in the step and in the cache.
    kv_caches: for each layer the tensors that its model declared (`Model.kv_cache`).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sample_indices: torch.Tensor
    attention: AttentionMetadata
    kv_caches: list[tuple[torch.Tensor, ...]]

    def attend(self, q: torch.Tensor, call: Attend) -> torch.Tensor:
        """`call` on this step's rows and caches. The one place of a layer whose work depends on more than the number of
        tokens; whoever captures layers cuts here, and later calls with the batch of the step that is played."""
        return call(q, self)
