# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Choosing experts in Triton: one program a token, all experts of it in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.moe.routing import Routing
from tokenspeed_kernel.registry import Band, cuda, kernel

_MOST_EXPERTS = 1024


@triton.jit
def _best_groups(
    choice, expert, there,
    GROUP_SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
):  # fmt: skip
    """Whether each expert's group is among the best, the lowest group first among equals."""
    group = expert // GROUP_SIZE
    ranks = tl.full(expert.shape, float("-inf"), tl.float32)
    for index in tl.static_range(NUM_GROUPS):
        mine = tl.where(there & (group == index), choice, float("-inf"))
        rank = tl.max(mine, axis=0)
        if BEST_TWO:
            rank += tl.max(tl.where(expert == tl.argmax(mine, axis=0), float("-inf"), mine), axis=0)
        ranks = tl.where(there & (group == index), rank, ranks)
    taken = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(tl.where(taken, float("-inf"), ranks), axis=0) // GROUP_SIZE
        taken = taken | (group == best)
    return taken


@triton.jit
def route_kernel(
    logits, bias, weights, experts, stride, scale,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    RENORMALIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    TILE_E: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """One token: scores of all experts in float32, then TOP_K times the largest that is left."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, TILE_E)
    there = expert < NUM_EXPERTS
    logit = tl.load(logits + token * stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        scores = tl.exp(logit - tl.max(logit, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = scores
    if BIASED:
        choice += tl.load(bias + expert, mask=there, other=0.0)
    choice = tl.where(there, choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        group_size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
        open = _best_groups(choice, expert, there, group_size, NUM_GROUPS, TOP_GROUPS, BEST_TWO)
        choice = tl.where(open, choice, float("-inf"))
    place = tl.arange(0, TILE_K)
    chosen = tl.zeros([TILE_K], tl.int32)
    weight = tl.zeros([TILE_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=0)
        chosen = tl.where(place == k, best, chosen)
        weight = tl.where(place == k, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), weight)
        choice = tl.where(expert == best, float("-inf"), choice)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    tl.store(weights + token * TOP_K + place, weight * scale, mask=place < TOP_K)
    tl.store(experts + token * TOP_K + place, chosen, mask=place < TOP_K)


def _few_enough(num_experts: int) -> bool:
    return num_experts <= _MOST_EXPERTS


@kernel(
    "moe.route",
    name="triton",
    needs=cuda(8),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    traits={"num_experts": _few_enough},
    band=Band.PORTABLE,
)
def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""
    tokens, num_experts = logits.shape
    if num_experts != routing.num_experts or logits.stride(1) != 1:
        raise ValueError(f"logits must be [T, {routing.num_experts}] with adjacent elements, got {logits.shape}")
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            logits, bias, weights, experts, logits.stride(0), routing.scale,
            NUM_EXPERTS=num_experts, TOP_K=routing.top_k, SIGMOID=routing.scores == "sigmoid",
            BIASED=bias is not None, RENORMALIZE=routing.renormalize, NUM_GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups, BEST_TWO=routing.group_score == "best_two",
            TILE_E=triton.next_power_of_2(num_experts), TILE_K=triton.next_power_of_2(routing.top_k), num_warps=1,
        )  # fmt: skip
    return weights, experts
