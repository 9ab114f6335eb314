# SPDX-License-Identifier: MIT
"""DeepSeek-V2, V2-Lite and V3 (R1): multi-head latent attention and experts in groups beside shared ones.

The first layers have one dense network; in the others every token passes the shared experts and a few routed ones
(DeepSeek-AI 2024). V2 routes by softmax, V3 by sigmoids with a correction that keeps experts equally busy. V3's
layers for predicting several tokens at once, which lie behind the last one in its files, are not part of the model.
"""

from __future__ import annotations

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.layers import LatentAttention, RowLinear, gated_mlp_stages, routed_experts
from tokenspeed.layers.cache import LayerCache, latent_cache
from tokenspeed.models.llama import LlamaForCausalLM, LlamaLayer, hidden_norm, mlp
from tokenspeed.parallel import Chain, add, connect
from tokenspeed.weights import Weights
from tokenspeed.weights.experts import ExpertNames


class DeepseekLayer(LlamaLayer):
    """x + attention(norm(x)), then x + experts(norm(x)) or x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, cos_sin: torch.Tensor) -> None:
        self.attention_norm = hidden_norm(config, weights, "input_layernorm")
        self.attention = latent_attention(config, weights.at("self_attn"), layer, cos_sin)
        self.mlp_norm = hidden_norm(config, weights, "post_attention_layernorm")
        self.mlp = feed_forward(config, weights.at("mlp"), layer)


def latent_attention(config: ModelConfig, weights: Weights, layer: int, cos_sin: torch.Tensor) -> Chain:
    """Attention with its output projection."""
    assert config.latent is not None  # held by the configuration of this architecture
    width = config.num_heads * config.latent.value_dim
    return connect(
        weights.group,
        LatentAttention(config, weights, layer, cos_sin),
        RowLinear(weights, "o_proj", config.hidden_size, width, config.output_bias),
    )


def feed_forward(config: ModelConfig, weights: Weights, layer: int) -> Chain:
    """One dense network, or routed experts with shared ones beside them."""
    moe = config.moe
    if moe is None or not moe.sparse_layers[layer]:
        return mlp(config, weights)
    routed = routed_experts(weights, "gate", config.hidden_size, moe, ExpertNames())
    if not moe.shared_intermediate_size:
        return connect(weights.group, routed)
    shared = gated_mlp_stages(
        weights.at("shared_experts"), config.hidden_size, moe.shared_intermediate_size, config.activation, False
    )
    return connect(weights.group, add(weights.group, (routed,), shared))


class DeepseekForCausalLM(LlamaForCausalLM):
    layer_class = DeepseekLayer

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert config.latent is not None  # held by the configuration of this architecture
        if weights.device.type != "cpu":
            config.latent.check_registers()
        super().__init__(config, weights)

    def kv_cache(self, block_size: int) -> list[LayerCache]:
        """One row a token for all heads, whole on every rank."""
        assert self.config.latent is not None
        return [latent_cache(block_size, self.config.latent.row_dim, self.kv.dtype)] * self.config.num_layers
