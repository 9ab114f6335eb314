# SPDX-License-Identifier: MIT
"""gpt-oss: experts with a clamped SwiGLU, attention with sinks, every other layer in a window (OpenAI 2025).

Biases stand everywhere. A checkpoint holds all experts of a layer in one tensor, inputs before outputs, rows of gate
and up by turns; released ones hold it in mxfp4, which the reader decodes.
"""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig
from tokenspeed.layers import RoutedExperts, Router, clamped_experts
from tokenspeed.models.llama import LlamaForCausalLM, LlamaLayer
from tokenspeed.parallel import Chain, connect
from tokenspeed.weights import Weights


class GptOssLayer(LlamaLayer):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def feed_forward(self, config: ModelConfig, weights: Weights, layer: int) -> Chain:
        assert config.moe is not None  # held by the configuration of this architecture
        router = Router(weights.at("mlp.router"), config.hidden_size, config.moe)
        experts = clamped_experts(weights.at("mlp"), config.hidden_size, config.moe)
        return connect(weights.group, RoutedExperts(router, experts))


class GptOssForCausalLM(LlamaForCausalLM):
    layer_class = GptOssLayer
