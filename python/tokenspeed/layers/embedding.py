# SPDX-License-Identifier: MIT
"""The table of token vectors, and its counterpart from hidden states to logits. With tied weights they share it."""

from __future__ import annotations

import torch

from tokenspeed.config.heads import Share
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.parallel import Placement
from tokenspeed.weights import Weights
from tokenspeed.weights.scope import Split
from tokenspeed.weights.shard import check_even
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

    def __init__(self, weight: Weight, width: int) -> None:
        """width: of the widest rank's part. Parts are gathered side by side, so all are made as wide."""
        self._weight = weight
        self._padding = width - weight.shape[0]

    @classmethod
    def load(cls, weights: Weights, name: str, tied_to: Embedding | None, shape: tuple[int, int]) -> LMHead:
        """name: of the module that holds the weight, the embedding's when `tied_to` it; shape: [vocab, hidden]."""
        if tied_to is not None and weights.group.size == 1:
            return cls(tied_to.weight, shape[0])
        # The last rank's part is the one that may be short, so that the vocabulary lies without gaps.
        width = -(-shape[0] // weights.group.size)
        start = min(weights.group.rank * width, shape[0])
        share = Share(start, min(width, shape[0] - start)) if shape[0] % weights.group.size else None
        if share is not None and weights.device.type != "cpu":
            check_even(shape[0], weights.group, f"{name}: the vocabulary")
        return cls(weights.matrix(f"{name}.weight", shape, Split.OUTPUTS, share), width)

    def __call__(self, x: torch.Tensor, _batch: ForwardBatch, /) -> torch.Tensor:
        """[S, hidden_size] to float32 [S, width]."""
        logits = api.logits(x, self._weight)
        return torch.nn.functional.pad(logits, (0, self._padding)) if self._padding else logits
