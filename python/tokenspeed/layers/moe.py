# SPDX-License-Identifier: MIT
"""A mixture of experts (Shazeer et al. 2017): a router chooses a few feed-forward networks for every token.

The router is whole on every rank, so all ranks choose alike; each expert's inner columns are split among the ranks
like those of a dense network. `RoutedExperts` is a stage that gives a summand: `connect` puts the sum over ranks
behind it, and `add` sums it with shared experts first, so that both take one collective.
"""

from __future__ import annotations

import dataclasses

import torch

from tokenspeed.config.moe import MoEConfig
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.parallel import Placement
from tokenspeed.weights import Weights
from tokenspeed.weights.experts import ExpertNames, load_experts, named_source, own_bias
from tokenspeed.weights.scope import Split
from tokenspeed_kernel import api


class Router:
    """Logits x @ W.T + b, and the choice. `weights` is the router's own place in the checkpoint."""

    def __init__(self, weights: Weights, hidden_size: int, config: MoEConfig) -> None:
        self._dtype = torch.float32 if config.float32_router else weights.dtype
        ours = dataclasses.replace(weights, dtype=self._dtype)
        self._weight = ours.matrix("weight", (config.num_experts, hidden_size), Split.NONE)
        self._bias = ours.vector("bias", config.num_experts) if config.router_bias else None
        self._correction: torch.Tensor | None = None
        if config.correction_bias:
            full = dataclasses.replace(weights, dtype=torch.float32)
            self._correction = full.vector(config.correction_bias, config.num_experts)
        self._routing = api.Routing(
            config.num_experts,
            config.top_k,
            scores=config.scores,
            renormalize=config.renormalize,
            scale=config.scale,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            group_score=config.group_score,
        )

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] to (weights float32 [T, top_k], experts int32 [T, top_k])."""
        logits = api.linear(x.to(self._dtype), self._weight, self._bias)
        return api.route(logits, self._routing, self._correction)


class RoutedExperts:
    """The weighted sum of each token's experts."""

    takes = Placement.REPLICATED
    gives = Placement.PARTIAL

    def __init__(self, router: Router, experts: api.Experts) -> None:
        self._router = router
        self._experts = experts

    def __call__(self, x: torch.Tensor, _batch: ForwardBatch, /) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        return api.run_experts(x, *self._router(x), self._experts)


def routed_experts(
    weights: Weights, router: str, hidden_size: int, config: MoEConfig, names: ExpertNames
) -> RoutedExperts:
    """A router, the module `router` under `weights`, and SwiGLU experts without biases under "experts"."""
    num_experts, inner = config.num_experts, config.intermediate_size
    gate_up, down = load_experts(
        weights,
        num_experts,
        named_source(weights, names.gate, num_experts, (inner, hidden_size)),
        named_source(weights, names.up, num_experts, (inner, hidden_size)),
        named_source(weights, names.down, num_experts, (hidden_size, inner)),
    )
    experts = api.Experts(gate_up, down, None, None, api.GatedActivation())
    return RoutedExperts(Router(weights.at(router), hidden_size, config), experts)


def clamped_experts(weights: Weights, hidden_size: int, config: MoEConfig) -> api.Experts:
    """This rank's part of the experts under `weights`, taken out of their two tensors."""
    if not weights.has("experts.gate_up_proj"):
        return _clamped_experts_apart(weights, hidden_size, config)
    num_experts, inner, group = config.num_experts, config.intermediate_size, weights.group
    gate_up = weights.whole("experts.gate_up_proj", (num_experts, hidden_size, 2 * inner))
    down = weights.whole("experts.down_proj", (num_experts, inner, hidden_size))
    matrices = load_experts(
        weights,
        num_experts,
        lambda expert: gate_up[expert].T[0::2],
        lambda expert: gate_up[expert].T[1::2],
        lambda expert: down[expert].T,
    )
    bias = weights.whole("experts.gate_up_proj_bias", (num_experts, 2 * inner))
    halves = [own_bias(bias[:, start::2], group) for start in (0, 1)]
    down_bias = weights.whole("experts.down_proj_bias", (num_experts, hidden_size))
    return _clamped(weights, matrices, halves, down_bias, config)


def _clamped_experts_apart(weights: Weights, hidden_size: int, config: MoEConfig) -> api.Experts:
    """The same where gate, up and down lie apart, outputs before inputs, as in GGUF files."""
    num_experts, inner, names = config.num_experts, config.intermediate_size, ExpertNames()
    matrices = load_experts(
        weights,
        num_experts,
        named_source(weights, names.gate, num_experts, (inner, hidden_size)),
        named_source(weights, names.up, num_experts, (inner, hidden_size)),
        named_source(weights, names.down, num_experts, (hidden_size, inner)),
    )
    biases = [weights.whole(f"experts.{name}.bias", (num_experts, inner)) for name in (names.gate, names.up)]
    halves = [own_bias(bias, weights.group) for bias in biases]
    down_bias = weights.whole(f"experts.{names.down}.bias", (num_experts, hidden_size))
    return _clamped(weights, matrices, halves, down_bias, config)


def _clamped(
    weights: Weights,
    matrices: tuple[tuple[api.ExpertMatrix, ...], api.ExpertMatrix],
    biases: list[torch.Tensor],
    down_bias: torch.Tensor,
    config: MoEConfig,
) -> api.Experts:
    return api.Experts(
        *matrices,
        weights.on_device(torch.cat(biases, dim=1)),
        # Ranks give summands: the bias is in the first one's.
        weights.on_device(down_bias) if weights.group.rank == 0 else None,
        api.GatedActivation("swiglu_clamped", config.swiglu_alpha, config.swiglu_limit),
    )
