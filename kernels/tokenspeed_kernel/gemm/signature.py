# SPDX-License-Identifier: MIT
"""What selection knows of a matrix product."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenspeed_kernel.quant.packed import Weight, weight_traits

MANY_TOKENS = 2112
_EXACT_TOKENS = 256
_TOKENS_STEP = 64
PRODUCT_TRAITS = ("weight_format", "weight_layout", "tokens", "outputs", "inputs")


def counted_tokens(tokens: int) -> int:
    """Rows of x as selection counts them: up to 256 each, then in steps of 64, at most MANY_TOKENS."""
    if tokens <= _EXACT_TOKENS:
        return tokens
    return min(-(-tokens // _TOKENS_STEP) * _TOKENS_STEP, MANY_TOKENS)


def product_traits(x: torch.Tensor, weight: Weight) -> tuple[Hashable, ...]:
    """Values of PRODUCT_TRAITS for x [T, K] @ weight [N, K]."""
    outputs, inputs = weight.shape
    return (*weight_traits(weight), counted_tokens(x.shape[0]), outputs, inputs)
