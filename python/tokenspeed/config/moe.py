# SPDX-License-Identifier: MIT
"""What a mixture of experts is: numbers of a config.json or of a GGUF file's metadata. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MoEConfig:
    """The routed experts of a model's sparse layers.

    num_experts, top_k: experts of a layer and how many a token is sent to.
    intermediate_size: inner columns of one expert, over all ranks.
    sparse_layers: which layers have experts; the others have one feed-forward network.
    scores, renormalize, scale, num_groups, top_groups, group_score: how experts are chosen and weighed; see
        `tokenspeed_kernel.api.Routing`.
    router_bias: whether the router adds a bias to its logits.
    correction_bias: name, under the router, of the vector that is added to scores for the choice alone; "" for none.
    float32_router: the router's logits are computed in float32 whatever the activations' dtype.
    shared_intermediate_size: inner columns of the network that every token passes beside its experts; 0 for none.
    swiglu_alpha, swiglu_limit: of gpt-oss's clamped activation; a limit of 0 means plain SwiGLU.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    router_bias: bool = False
    correction_bias: str = ""
    float32_router: bool = False
    shared_intermediate_size: int = 0
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
