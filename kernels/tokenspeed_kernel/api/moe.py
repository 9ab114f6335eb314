# SPDX-License-Identifier: MIT
"""Operations of a mixture of experts: prepare the experts' weights, route tokens, run the chosen experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from tokenspeed_kernel.moe.routing import Routing
from tokenspeed_kernel.moe.weights import ExpertMatrix, Experts
from tokenspeed_kernel.quant.packed import Weight, weight_traits
from tokenspeed_kernel.registry import ops, solve


def prepare_experts(
    experts: Iterable[Weight], num_experts: int, device: torch.device | str, dtype: torch.dtype
) -> ExpertMatrix:
    """One matrix of every expert, re-packed once, at load, into the form that `run_experts` reads fastest.

    experts: `num_experts` weights [N, K] of one format, each as `prepare_weight` takes it, in expert order. They are
        taken one after the other, so an iterator that reads them from a file holds one at a time.
    device, dtype: as for `prepare_weight`.

    Raises ValueError when their number, formats or shapes disagree.
    """
    where = torch.device(device)
    rest = iter(experts)
    first = next(rest, None)
    if first is None:
        raise ValueError("no experts to prepare")
    data = first if isinstance(first, torch.Tensor) else first.data
    solution = solve(ops.MOE_PREPARE, where.type, data.dtype, weight_traits(first)[0])
    matrix: ExpertMatrix = solution(_alike(itertools.chain([first], rest), num_experts), num_experts, where, dtype)
    return matrix


def _alike(experts: Iterable[Weight], num_experts: int) -> Iterable[Weight]:
    want: tuple[tuple[str, str], tuple[int, ...]] | None = None
    count = 0
    for weight in experts:
        have = weight_traits(weight), tuple(weight.shape)
        if have != (want or have):
            raise ValueError(f"expert {count} is {have}, those before it are {want}")
        want = have
        count += 1
        if count > num_experts:
            break
        yield weight
    if count != num_experts:
        raise ValueError(f"{num_experts} experts expected, got {'more' if count > num_experts else count}")


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts.

    logits: [T, E], E = routing.num_experts; scores are computed in float32 whatever the dtype.
    routing: how; see `Routing`.
    bias: float32 [E] added to the scores for the choice alone, not to the weights (DeepSeek-V3), or None.

    Returns (weights float32 [T, top_k], experts int32 [T, top_k]), the best first, the lowest number first among
    equals. A token's experts are distinct.
    """
    return solve(ops.MOE_ROUTE, logits.device.type, logits.dtype, routing.scores, routing.num_experts, routing.grouped)(
        logits, routing, bias
    )


def run_experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The weighted sum of the chosen experts' networks.

    x: [T, H], elements of a row adjacent.
    weights: float32 [T, top_k]; chosen: int32 [T, top_k], each in [0, E), distinct in a row. Both contiguous.
    experts: the layer's weights, as `prepare_experts` returned them.

    Returns [T, rows of down] in x's dtype: sum over k of weights[t, k] * expert chosen[t, k] of x[t]; products
    accumulated in float32.
    """
    return solve(ops.MOE_EXPERTS, x.device.type, x.dtype, *experts.traits)(x, weights, chosen, experts)
