# SPDX-License-Identifier: MIT
"""How much of a prompt token's arithmetic depends on how many tokens stand before it, from a model's shape alone."""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig


def context_cost_tokens(model: ModelConfig) -> int:
    """With so many tokens before it, attending costs a token as many operations as all products with weights; 0 when
    every layer has a window, and the context never matters."""
    attended = _operations_per_attended_token(model) * sum(window == 0 for window in model.windows)
    if attended == 0:
        return 0
    return max(1, sum(_weights_of(model, layer) for layer in range(model.num_layers)) * 2 // attended)


def _operations_per_attended_token(model: ModelConfig) -> int:
    """Of one query in one layer: its scores and the weighted sum of values."""
    if model.latent is not None:
        return 2 * model.num_heads * (2 * model.latent.latent_dim + model.latent.rope_dim)
    return 4 * model.num_heads * model.head_dim


def _weights_of(model: ModelConfig, layer: int) -> int:
    """Weights of a layer that one token is multiplied with."""
    hidden, moe = model.hidden_size, model.moe
    if moe is None or not moe.sparse_layers[layer]:
        return _attention_weights(model) + 3 * hidden * model.intermediate_size
    inner = moe.top_k * moe.intermediate_size + moe.shared_intermediate_size
    return _attention_weights(model) + hidden * (3 * inner + moe.num_experts)


def _attention_weights(model: ModelConfig) -> int:
    hidden, heads, latent = model.hidden_size, model.num_heads, model.latent
    if latent is None:
        return hidden * model.head_dim * 2 * (heads + model.num_kv_heads)
    wide = heads * latent.query_dim
    queries = hidden * wide if latent.query_rank is None else latent.query_rank * (hidden + wide)
    keys_and_values = hidden * (latent.latent_dim + latent.rope_dim)
    per_head = latent.latent_dim * (latent.nope_dim + latent.value_dim) + latent.value_dim * hidden
    return queries + keys_and_values + heads * per_head
