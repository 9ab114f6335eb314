# SPDX-License-Identifier: MIT
"""Qwen3-MoE: Qwen3 with many small experts in most layers or all (Qwen team 2025); the others have one network."""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig
from tokenspeed.layers import routed_experts
from tokenspeed.models.llama import LlamaForCausalLM, LlamaLayer, mlp
from tokenspeed.parallel import Chain, connect
from tokenspeed.weights import Weights
from tokenspeed.weights.experts import ExpertNames


class Qwen3MoeLayer(LlamaLayer):
    """x + attention(norm(x)), then x + experts(norm(x)) or x + mlp(norm(x))."""

    def feed_forward(self, config: ModelConfig, weights: Weights, layer: int) -> Chain:
        assert config.moe is not None  # held by the configuration of this architecture
        if not config.moe.sparse_layers[layer]:
            return mlp(config, weights.at("mlp"))
        experts = routed_experts(weights.at("mlp"), "gate", config.hidden_size, config.moe, ExpertNames())
        return connect(weights.group, experts)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3MoeLayer
