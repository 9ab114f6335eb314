# SPDX-License-Identifier: MIT
"""Multi-head latent attention (DeepSeek-V2, 2024) over a paged cache of latents, up to the output projection.

The absorbed form, for prompts and for decoding alike: instead of making every cached token's keys and values, each
query is multiplied by its head's key projection, attends to the latents themselves, and the sum of latents is
multiplied by the head's value projection. So a token has the same bits cold or warm, and 576 numbers are cached where
128 heads would need 40,960. Heads are split among the ranks; the latent, small and shared, is whole on each.
"""

from __future__ import annotations

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.parallel import Placement
from tokenspeed.weights import Weights
from tokenspeed.weights.scope import Split
from tokenspeed_kernel import api

# The norms inside attention have their own, whatever the configuration says of the others.
_INNER_EPS = 1e-6


class LatentQuery:
    """From hidden states to this rank's queries, through a vector of `query_rank` where the model has one."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert config.latent is not None
        rank, hidden = config.latent.query_rank, config.hidden_size
        num_outputs = config.num_heads * config.latent.query_dim
        self._norm: RMSNorm | None = None
        if rank is None:
            self._up = weights.matrix("q_proj.weight", (num_outputs, hidden), Split.OUTPUTS)
            return
        self._down = weights.matrix("q_a_proj.weight", (rank, hidden), Split.NONE)
        self._bias = weights.vector("q_a_proj.bias", rank) if config.output_bias else None
        self._norm = RMSNorm(weights, "q_a_layernorm", rank, _INNER_EPS, 0.0)
        self._up = weights.matrix("q_b_proj.weight", (num_outputs, rank), Split.OUTPUTS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, heads * query_dim]."""
        if self._norm is not None:
            x = self._norm(api.linear(x, self._down, self._bias))
        return api.linear(x, self._up)


class LatentAttention:
    """Everything of attention but o_proj; `weights` is the module that holds both."""

    takes = Placement.REPLICATED
    gives = Placement.SHARDED

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, cos_sin: torch.Tensor) -> None:
        assert config.latent is not None
        sizes = self._sizes = config.latent
        self._layer, self._cos_sin = layer, cos_sin
        # One divisor for the whole row: a value is a part of its key.
        self._divisor, _ = weights.kv_scales(layer)
        self._scale = config.attention_scale * self._divisor
        self._heads = config.num_heads // weights.group.size
        self._query = LatentQuery(config, weights)
        name, row = "kv_a_proj_with_mqa", sizes.row_dim
        self._down = weights.matrix(f"{name}.weight", (row, config.hidden_size), Split.NONE)
        self._bias = weights.vector(f"{name}.bias", row) if config.output_bias else None
        self._norm = RMSNorm(weights, "kv_a_layernorm", sizes.latent_dim, _INNER_EPS, 0.0)
        shape = (config.num_heads * (sizes.nope_dim + sizes.value_dim), sizes.latent_dim)
        up = weights.dense("kv_b_proj.weight", shape, Split.OUTPUTS).unflatten(0, (self._heads, -1))
        keys, values = up.split([sizes.nope_dim, sizes.value_dim], dim=1)
        self._up_keys = weights.prepare(keys.transpose(1, 2).flatten(0, 1))
        self._up_values = weights.prepare(values.flatten(0, 1))

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, /) -> torch.Tensor:
        """[T, hidden_size] to [T, heads * value_dim]."""
        sizes, num_tokens = self._sizes, x.shape[0]
        nope, rotated = (
            self._query(x).view(num_tokens, self._heads, sizes.query_dim).split([sizes.nope_dim, sizes.rope_dim], dim=2)
        )
        latent, key = api.linear(x, self._down, self._bias).split([sizes.latent_dim, sizes.rope_dim], dim=1)
        api.rope(rotated, key.unsqueeze(1), batch.positions, self._cos_sin, sizes.interleaved)
        (cache,) = batch.kv_caches[self._layer]
        latent = self._norm(latent)
        if self._divisor != 1.0:
            latent, key = latent / self._divisor, key / self._divisor
        api.store_latent(latent, key, cache, batch.slot_mapping)
        queries = x.new_empty(num_tokens, self._heads, sizes.row_dim)
        api.linear_heads(nope, self._up_keys, queries[..., : sizes.latent_dim])
        queries[..., sizes.latent_dim :] = rotated
        sums = api.latent_attention(queries, cache, batch.attention, self._scale, sizes.latent_dim)
        out = x.new_empty(num_tokens, self._heads, sizes.value_dim)
        if self._divisor != 1.0:
            sums *= self._divisor
        api.linear_heads(sums, self._up_values, out)
        return out.flatten(1)
