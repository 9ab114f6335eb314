# SPDX-License-Identifier: MIT
"""Gemma 2 and 3, text only: Llama's outline with norms after attention and MLP too (Gemma team 2024, 2025).

Embeddings are scaled up, the MLP's gate is a GELU, norm weights are stored around zero. Gemma 2: every other layer sees
a window; scores and logits have a soft cap. Gemma 3: all but every sixth layer see a window and rotate with a base of
their own; queries and keys are normalised.
"""

from __future__ import annotations

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.layers import ForwardBatch
from tokenspeed.models.llama import LlamaForCausalLM, LlamaLayer, attention, hidden_norm, mlp
from tokenspeed.models.model import Hidden
from tokenspeed.weights import Weights


class Gemma3Layer(LlamaLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, cos_sin: torch.Tensor) -> None:
        self.attention_norm = hidden_norm(config, weights, "input_layernorm")
        self.attention = attention(config, weights.at("self_attn"), layer, cos_sin)
        self.after_attention_norm = hidden_norm(config, weights, "post_attention_layernorm")
        self.mlp_norm = hidden_norm(config, weights, "pre_feedforward_layernorm")
        self.mlp = mlp(config, weights.at("mlp"))
        self.after_mlp_norm = hidden_norm(config, weights, "post_feedforward_layernorm")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.attention_norm.add(x, residual)
        x = self.after_attention_norm(self.attention(x, batch))
        x, residual = self.mlp_norm.add(x, residual)
        return self.after_mlp_norm(self.mlp(x, batch)), residual

    def adds(self, x: torch.Tensor) -> bool:
        """Norms stand between the products and the sums."""
        return False


class Gemma3ForCausalLM(LlamaForCausalLM):
    layer_class = Gemma3Layer

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        # Rounded to the activations' dtype, as the model was trained.
        self.embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=weights.dtype))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(token_ids) * self.embedding_scale

    def logits(self, hidden: Hidden, batch: ForwardBatch) -> torch.Tensor:
        logits = super().logits(hidden, batch)
        cap = self.config.logits_softcap
        return torch.tanh(logits / cap) * cap if cap else logits
