# SPDX-License-Identifier: MIT
"""gpt-oss: experts with a clamped SwiGLU, attention with sinks, every other layer in a window (OpenAI 2025).

Biases stand everywhere. A checkpoint holds all experts of a layer in one tensor, inputs before outputs, rows of gate
and up by turns; released ones hold it in mxfp4, which the reader decodes.
"""

from __future__ import annotations

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.config.moe import MoEConfig
from tokenspeed.layers import RoutedExperts, Router
from tokenspeed.models.llama import LlamaForCausalLM, LlamaLayer
from tokenspeed.parallel import Chain, connect
from tokenspeed.weights import Weights
from tokenspeed.weights.experts import load_experts, own_bias
from tokenspeed_kernel import api


class GptOssLayer(LlamaLayer):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def feed_forward(self, config: ModelConfig, weights: Weights, layer: int) -> Chain:
        assert config.moe is not None  # held by the configuration of this architecture
        router = Router(weights.at("mlp.router"), config.hidden_size, config.moe)
        experts = clamped_experts(weights.at("mlp"), config.hidden_size, config.moe)
        return connect(weights.group, RoutedExperts(router, experts))


def clamped_experts(weights: Weights, hidden_size: int, config: MoEConfig) -> api.Experts:
    """This rank's part of the experts under `weights`, taken out of their two tensors."""
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
    return api.Experts(
        *matrices,
        weights.on_device(torch.cat(halves, dim=1)),
        # Ranks give summands: the bias is in the first one's.
        weights.on_device(down_bias) if group.rank == 0 else None,
        api.GatedActivation("swiglu_clamped", config.swiglu_alpha, config.swiglu_limit),
    )


class GptOssForCausalLM(LlamaForCausalLM):
    layer_class = GptOssLayer
