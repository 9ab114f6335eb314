# SPDX-License-Identifier: MIT
"""The table of token vectors, and its counterpart from hidden states to logits. With tied weights they share it."""

from __future__ import annotations

import torch

from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.parallel import Placement
from tokenspeed.weights import Weights
from tokenspeed.weights.scope import Split
from tokenspeed_kernel import api
from tokenspeed_kernel.api import Weight


class Embedding:
    """Rows of a [vocab_size, hidden_size] table that every rank holds whole."""

    def __init__(self, weights: Weights, name: str, vocab_size: int, hidden_size: int) -> None:
        self.weight = weights.matrix(f"{name}.weight", (vocab_size, hidden_size), Split.NONE)
        self._dtype = weights.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, hidden_size]."""
        return api.embedding(token_ids, self.weight, self._dtype)


class LMHead:
    """Logits x @ W.T, the vocabulary split among the ranks."""

    takes = Placement.REPLICATED
    gives = Placement.SHARDED

    def __init__(self, weight: Weight) -> None:
        self._weight = weight

    @classmethod
    def load(cls, weights: Weights, name: str, tied_to: Embedding | None, shape: tuple[int, int]) -> LMHead:
        """name: of the module that holds the weight, the embedding's when `tied_to` it; shape: [vocab, hidden]."""
        if tied_to is not None and weights.group.size == 1:
            return cls(tied_to.weight)
        return cls(weights.matrix(f"{name}.weight", shape, Split.OUTPUTS))

    def __call__(self, x: torch.Tensor, _batch: ForwardBatch, /) -> torch.Tensor:
        """[S, hidden_size] to float32 [S, vocab_size / ranks]."""
        return api.logits(x, self._weight)
