# SPDX-License-Identifier: MIT
"""The Llama family: Llama 2 and 3, Mistral, Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k).

A decoder of pre-norm layers, each attention then a gated MLP (Touvron et al. 2023). What its members differ in is
data of `ModelConfig`: biases, head size, windows, rope scaling, tied embeddings.
"""

from __future__ import annotations

import torch

from tokenspeed.config.heads import head_shares
from tokenspeed.config.model import ModelConfig
from tokenspeed.layers import (
    AttentionShape,
    ColumnLinear,
    Embedding,
    ForwardBatch,
    LMHead,
    PagedAttention,
    RMSNorm,
    RowLinear,
    gated_mlp,
    rope_tables,
)
from tokenspeed.models.model import Hidden, Model
from tokenspeed.parallel import Chain, connect
from tokenspeed.weights import Weights


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the additions are fused into the norms that follow them."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, cos_sin: torch.Tensor) -> None:
        self.attention_norm = hidden_norm(config, weights, "input_layernorm")
        self.attention = attention(config, weights.at("self_attn"), layer, cos_sin)
        self.mlp_norm = hidden_norm(config, weights, "post_attention_layernorm")
        self.mlp = self.feed_forward(config, weights, layer)

    def feed_forward(self, config: ModelConfig, weights: Weights, layer: int) -> Chain:
        """What follows the layer's second norm; a mixture of experts brings its own."""
        return mlp(config, weights.at("mlp"))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: what the layer before gave; residual: the sum of all before that. Both [T, hidden_size]."""
        x, residual = self.attention_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attention(x, batch), residual)
        return self.mlp(x, batch), residual

    def adds(self, x: torch.Tensor) -> bool:
        """Whether a step of x's rows is faster with `total`."""
        return self.attention.adds(x) and self.mlp.adds(x)

    def total(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The sum of both that a call gives, from such a sum, in its place: the products that end attention and MLP do
        the additions, where rows are so many that reading one tensor less pays in the norms."""
        x = self.attention.add_to(x, self.attention_norm(x), batch)
        return self.mlp.add_to(x, self.mlp_norm(x), batch)


def attention(config: ModelConfig, weights: Weights, layer: int, cos_sin: torch.Tensor) -> Chain:
    """q_proj, k_proj, v_proj and o_proj under `weights`, with q_norm and k_norm where the model has them."""
    hidden, head_dim, group = config.hidden_size, config.head_dim, weights.group
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    heads, kv_heads = head_shares(config.num_heads, config.num_kv_heads, group.rank, group.size)
    queries, keys = heads.scaled(head_dim), kv_heads.scaled(head_dim)
    shape = AttentionShape(
        heads.count,
        kv_heads.count,
        head_dim,
        config.attention_scale,
        config.windows[layer],
        config.attention_softcap,
        *weights.kv_scales(layer),
    )
    norms = None
    if config.qk_norm:
        eps, offset = config.rms_norm_eps, config.norm_offset
        norms = (
            RMSNorm(weights, "q_norm", head_dim, eps, offset),
            RMSNorm(weights, "k_norm", head_dim, eps, offset),
        )
    sinks = weights.stacked_bias(["sinks"], [config.num_heads], [heads]) if config.attention_sinks else None
    return connect(
        group,
        ColumnLinear(
            weights,
            ("q_proj", "k_proj", "v_proj"),
            (q_size, kv_size, kv_size),
            hidden,
            config.qkv_bias,
            (queries, keys, keys),
        ),
        PagedAttention(layer, shape, cos_sin, norms, sinks),
        RowLinear(weights, "o_proj", hidden, q_size, config.output_bias, queries),
    )


def mlp(config: ModelConfig, weights: Weights) -> Chain:
    """gate_proj, up_proj and down_proj under `weights`."""
    return gated_mlp(weights, config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias)


def hidden_norm(config: ModelConfig, weights: Weights, name: str) -> RMSNorm:
    """A norm over hidden states."""
    return RMSNorm(weights, name, config.hidden_size, config.rms_norm_eps, config.norm_offset)


class LlamaForCausalLM(Model):
    """Its layers are `layer_class`; another architecture of the same outline brings its own."""

    layer_class: type[LlamaLayer] = LlamaLayer
    cuts_at_attention = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        decoder = weights.at("model")
        vocab_size, hidden = config.vocab_size, config.hidden_size
        self.embedding = Embedding(decoder, "embed_tokens", vocab_size, hidden)
        self.layers = [
            self.layer_class(config, decoder.at(f"layers.{layer}"), layer, cos_sin)
            for layer, cos_sin in enumerate(rope_tables(config, weights.device))
        ]
        self.norm = hidden_norm(config, decoder, "norm")
        tied = self.embedding if config.tie_word_embeddings else None
        head = "model.embed_tokens" if tied else "lm_head"
        self.head = connect(weights.group, LMHead.load(weights, head, tied, (vocab_size, hidden)))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The first layer's input [T, hidden_size]."""
        return self.embedding(token_ids)

    def hidden(self, batch: ForwardBatch) -> Hidden:
        x = self.embed(batch.token_ids)
        if all(layer.adds(x) for layer in self.layers):
            for layer in self.layers:
                x = layer.total(x, batch)
            return x, torch.zeros_like(x)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return x, residual

    def logits(self, hidden: Hidden, batch: ForwardBatch) -> torch.Tensor:
        x, residual = hidden
        if batch.sample_indices.shape[0] < x.shape[0]:
            # Only the sampled tokens go on: the vocabulary is the widest product of all.
            x, residual = x[batch.sample_indices], residual[batch.sample_indices]
        x, _ = self.norm.add(x, residual)
        logits = self.head(x, batch)
        # Where the vocabulary does not divide among the ranks, there are columns behind it.
        size = self.config.vocab_size
        return logits if logits.shape[1] == size else logits[:, :size].contiguous()
