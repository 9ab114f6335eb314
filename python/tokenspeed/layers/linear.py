# SPDX-License-Identifier: MIT
"""Matrix products: one weight, or several on top of each other, split among the ranks by outputs or by inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.config.heads import Share
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.parallel import Placement
from tokenspeed.weights import Weights
from tokenspeed.weights.scope import Split
from tokenspeed_kernel import api


class ColumnLinear:
    """y = x @ [W1; W2; ...].T + b, each W split by outputs: every rank gives its part of every W.

    names: modules under `weights`, stacked in this order; sizes: outputs of each, over all ranks; shares: this rank's
    of each, where they are not split evenly.
    """

    takes = Placement.REPLICATED
    gives = Placement.SHARDED

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        sizes: Sequence[int],
        num_inputs: int,
        bias: bool,
        shares: Sequence[Share] | None = None,
    ) -> None:
        self._parts = weights.stacked([f"{name}.weight" for name in names], sizes, num_inputs, shares)
        self._bias = weights.stacked_bias([f"{name}.bias" for name in names], sizes, shares) if bias else None
        self._whole = self._parts[0] if len(self._parts) == 1 else None

    def __call__(self, x: torch.Tensor, _batch: ForwardBatch, /) -> torch.Tensor:
        """[T, num_inputs] to [T, sum of sizes / ranks]."""
        if self._whole is not None:
            return api.linear(x, self._whole, self._bias)
        y = torch.cat([api.linear(x, part) for part in self._parts], dim=1)
        return y if self._bias is None else y.add_(self._bias)


class GatedLinear(ColumnLinear):
    """silu(gate) * up, where gate and up are a ColumnLinear's two matrices: each rank gives its columns of both."""

    def __init__(self, weights: Weights, names: tuple[str, str], size: int, num_inputs: int, bias: bool) -> None:
        super().__init__(weights, names, (size, size), num_inputs, bias)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, /) -> torch.Tensor:
        """[T, num_inputs] to [T, size / ranks]."""
        if self._whole is not None:
            return api.linear_silu_and_mul(x, self._whole, self._bias)
        return api.silu_and_mul(super().__call__(x, batch))


class RowLinear:
    """y = x @ W.T + b, W split by inputs: every rank gives a summand, the first one's with the bias.

    share: this rank's inputs, where they are not split evenly.
    """

    takes = Placement.SHARDED
    gives = Placement.PARTIAL

    def __init__(
        self, weights: Weights, name: str, num_outputs: int, num_inputs: int, bias: bool, share: Share | None = None
    ) -> None:
        self._weight = weights.matrix(f"{name}.weight", (num_outputs, num_inputs), Split.INPUTS, share)
        self._bias = weights.vector(f"{name}.bias", num_outputs) if bias else None
        if weights.group.rank != 0:
            self._bias = None

    def __call__(self, x: torch.Tensor, _batch: ForwardBatch, /) -> torch.Tensor:
        """[T, num_inputs / ranks] to [T, num_outputs]."""
        return api.linear(x, self._weight, self._bias)

    def adds(self, rows: torch.Tensor) -> bool:
        """Whether a step of so many rows, of the inputs' dtype, is faster with `add_to`."""
        return api.adds_within(rows, self._weight)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total + self(x), in the place of `total`."""
        return api.linear_add(x, self._weight, self._bias, total)
