# SPDX-License-Identifier: MIT
"""What the engine knows of any architecture: the shape of its cache and one step forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from tokenspeed.config.heads import head_shares
from tokenspeed.config.model import ModelConfig
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.cache import LayerCache, paired_cache
from tokenspeed.weights import Weights

Hidden = tuple[torch.Tensor, ...]
"""Tensors with a row a token."""


class Model(ABC):
    """A loaded model on one rank. Immutable; one thread runs it.

    Sub-classes are pages of layers: their constructor takes (config, weights) and either finishes or raises.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.device = weights.device
        self.dtype = weights.dtype
        self.kv = weights.kv
        _, kv_heads = head_shares(config.num_heads, config.num_kv_heads, weights.group.rank, weights.group.size)
        self.num_kv_heads = kv_heads.count

    cuts_at_attention: ClassVar[bool] = False
    """Said by a page for itself, not for pages made from it: all that depends on more than the number of tokens goes
    through `ForwardBatch.attend`, so that what lies between may be captured."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits float32 [S, vocab_size] of the batch's sampled tokens; writes every token's KV to the caches."""
        return self.logits(self.hidden(batch), batch)

    @abstractmethod
    def hidden(self, batch: ForwardBatch) -> Hidden:
        """What the last layer leaves of every token; writes every token's KV to the caches."""

    @abstractmethod
    def logits(self, hidden: Hidden, batch: ForwardBatch) -> torch.Tensor:
        """From what `hidden` gave to the logits of the batch's sampled tokens."""

    def kv_cache(self, block_size: int) -> list[LayerCache]:
        """What each layer of this rank keeps of a block of `block_size` tokens; by default keys and values."""
        layer = paired_cache(self.num_kv_heads, block_size, self.config.head_dim, self.kv)
        return [layer] * self.config.num_layers
