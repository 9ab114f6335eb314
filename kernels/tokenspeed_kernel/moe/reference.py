# SPDX-License-Identifier: MIT
"""Routing and experts in float32 torch: every expert in turn, its tokens through two products."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tokenspeed_kernel.gemm.reference import linear
from tokenspeed_kernel.moe.routing import Routing
from tokenspeed_kernel.moe.weights import ExpertMatrix, Experts, GatedActivation
from tokenspeed_kernel.quant.packed import (
    BLOCK_FORMATS,
    BLOCKS_LAYOUT,
    DENSE_FORMATS,
    ROWS_LAYOUT,
    Weight,
    weight_traits,
)
from tokenspeed_kernel.registry import Band, anywhere, kernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# A sum of sigmoids may be 0 in float32.
_LEAST_SUM = 1e-20


@kernel("moe.route", name="reference", needs=anywhere(), dtypes=_FLOATS, band=Band.REFERENCE)
def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of all experts, then the best of what groups leave."""
    scores = logits.float().softmax(dim=1) if routing.scores == "softmax" else logits.float().sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if routing.grouped:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), float("-inf"))
    # A stable sort: among equals the lowest number is first, which torch.topk does not promise.
    experts = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, experts)
    if routing.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + _LEAST_SUM)
    return weights * routing.scale, experts.int()


def _in_best_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """bool [T, E]: whether the expert's group is among the best."""
    grouped = choice.unflatten(1, (routing.num_groups, routing.group_size))
    best = grouped.sort(dim=2, descending=True).values
    ranks = best[:, :, 0] if routing.group_score == "best" else best[:, :, :2].sum(dim=2)
    groups = ranks.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_groups]
    chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, groups, True)
    return chosen.repeat_interleave(routing.group_size, dim=1)


def activate(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """float32 [T, 2 * I], gate then up, to [T, I]."""
    gate, up = gate_up.chunk(2, dim=1)
    if activation.kind == "silu":
        return gate * gate.sigmoid() * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * (gate * activation.alpha).sigmoid() * (up + 1)


def _readable(layouts: tuple[str, ...]) -> bool:
    return all(layout in (ROWS_LAYOUT, BLOCKS_LAYOUT) for layout in layouts)


@kernel(
    "moe.experts",
    name="reference",
    needs=anywhere(),
    dtypes=_FLOATS,
    traits={"weight_layouts": _readable},
    band=Band.REFERENCE,
)
def run_experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Products in float32, one rounding at the end."""
    out = torch.zeros(x.shape[0], experts.down.shape[1], dtype=torch.float32, device=x.device)
    parts = [list(matrix.experts()) for matrix in experts.gate_up]
    for expert, down in enumerate(experts.down.experts()):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if token.numel():
            tokens = x[token].float()
            gate_up = torch.cat([linear(tokens, part[expert], None) for part in parts], dim=1)
            if experts.gate_up_bias is not None:
                gate_up = gate_up + experts.gate_up_bias[expert].float()
            bias = None if experts.down_bias is None else experts.down_bias[expert]
            result = linear(activate(gate_up, experts.activation), down, bias)
            out.index_add_(0, token, result * weights[token, place, None])
    return out.to(x.dtype)


@kernel(
    "moe.prepare",
    name="reference",
    needs=anywhere(),
    dtypes=(*_FLOATS, torch.uint8),
    traits={"weight_format": (*DENSE_FORMATS, *BLOCK_FORMATS)},
    band=Band.REFERENCE,
)
def prepare(experts: Iterable[Weight], num_experts: int, device: torch.device, dtype: torch.dtype) -> ExpertMatrix:
    """The experts' weights side by side, as they are."""
    weights = list(experts)
    format, layout = weight_traits(weights[0])
    data = torch.stack([weight if isinstance(weight, torch.Tensor) else weight.data for weight in weights])
    num_rows, num_columns = weights[0].shape
    return ExpertMatrix(data.to(device), format, (num_experts, num_rows, num_columns), layout)
