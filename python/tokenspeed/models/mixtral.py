# SPDX-License-Identifier: MIT
"""Mixtral: Llama with eight networks in the place of one, of which each token passes two (Jiang et al. 2024)."""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig
from tokenspeed.layers import routed_experts
from tokenspeed.models.llama import LlamaForCausalLM, LlamaLayer
from tokenspeed.parallel import Chain, connect
from tokenspeed.weights import Weights
from tokenspeed.weights.experts import ExpertNames

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


class MixtralLayer(LlamaLayer):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def feed_forward(self, config: ModelConfig, weights: Weights, layer: int) -> Chain:
        assert config.moe is not None  # held by the configuration of this architecture
        experts = routed_experts(weights.at("block_sparse_moe"), "gate", config.hidden_size, config.moe, _NAMES)
        return connect(weights.group, experts)


class MixtralForCausalLM(LlamaForCausalLM):
    layer_class = MixtralLayer
