# SPDX-License-Identifier: MIT
"""The gated feed-forward network: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

import torch

from tokenspeed.config.model import Activation
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.linear import ColumnLinear, GatedLinear, RowLinear
from tokenspeed.parallel import Chain, Placement, Stage, connect
from tokenspeed.weights import Weights


class GeluAndMul:
    """gelu(gate) * up, with the tanh approximation. Each rank holds its own columns of both, gate first."""

    takes = Placement.SHARDED
    gives = Placement.SHARDED

    def __call__(self, x: torch.Tensor, _batch: ForwardBatch, /) -> torch.Tensor:
        """[T, 2 * I] to [T, I]."""
        gate, up = x.chunk(2, dim=1)
        return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


def gated_mlp(weights: Weights, hidden_size: int, intermediate_size: int, activation: Activation, bias: bool) -> Chain:
    """gate_proj, up_proj and down_proj under `weights`."""
    return connect(weights.group, *gated_mlp_stages(weights, hidden_size, intermediate_size, activation, bias))


def gated_mlp_stages(
    weights: Weights, hidden_size: int, intermediate_size: int, activation: Activation, bias: bool
) -> tuple[Stage, ...]:
    """The same before it is connected: what `add` takes."""
    names = ("gate_proj", "up_proj")
    if activation == "silu":
        first: tuple[Stage, ...] = (GatedLinear(weights, names, intermediate_size, hidden_size, bias),)
    else:
        both = ColumnLinear(weights, names, (intermediate_size, intermediate_size), hidden_size, bias)
        first = (both, GeluAndMul())
    return *first, RowLinear(weights, "down_proj", hidden_size, intermediate_size, bias)
