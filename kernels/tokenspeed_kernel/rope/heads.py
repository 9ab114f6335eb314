# SPDX-License-Identifier: MIT
"""Arguments of the fused step between a qkv projection and attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Heads(NamedTuple):
    """What the projection gave. q: [T, Hq, D]; k, v: [T, Hk, D]. Tokens may be strided, heads of a token adjacent."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class HeadNorms(NamedTuple):
    """RMSNorm of every head. q_weight, k_weight: [D], float32 or the heads' dtype; eps: added to the mean square."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class Slots(NamedTuple):
    """Where keys and values go. k_cache, v_cache: [num_blocks, Hk, block_size, D]; mapping, scales: as in `store_kv`.
    divisors: what keys and values are divided by first, or None."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    mapping: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None
    divisors: tuple[float, float] | None
