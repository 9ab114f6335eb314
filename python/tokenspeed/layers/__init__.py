# SPDX-License-Identifier: MIT
"""The parts of a model. A layer owns its prepared weights, says how its activations lie on the ranks, and is called."""

from tokenspeed.layers.attention import AttentionShape, PagedAttention
from tokenspeed.layers.batch import AttentionMetadata, ForwardBatch
from tokenspeed.layers.embedding import Embedding, LMHead
from tokenspeed.layers.latent import LatentAttention
from tokenspeed.layers.linear import ColumnLinear, RowLinear
from tokenspeed.layers.mlp import gated_mlp, gated_mlp_stages
from tokenspeed.layers.moe import RoutedExperts, Router, clamped_experts, routed_experts
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rope import rope_tables

__all__ = [
    "AttentionMetadata",
    "AttentionShape",
    "ColumnLinear",
    "Embedding",
    "ForwardBatch",
    "LMHead",
    "LatentAttention",
    "PagedAttention",
    "RMSNorm",
    "RoutedExperts",
    "Router",
    "RowLinear",
    "clamped_experts",
    "gated_mlp",
    "gated_mlp_stages",
    "rope_tables",
    "routed_experts",
]
