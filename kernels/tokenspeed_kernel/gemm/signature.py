# SPDX-License-Identifier: MIT
"""What selection knows of a matrix product."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenspeed_kernel.quant.packed import Weight, weight_traits

MANY_TOKENS = 65
PRODUCT_TRAITS = ("weight_format", "weight_layout", "tokens", "outputs", "inputs")


def product_traits(x: torch.Tensor, weight: Weight) -> tuple[Hashable, ...]:
    """Values of PRODUCT_TRAITS for x [T, K] @ weight [N, K]; every T from MANY_TOKENS on counts as that many."""
    outputs, inputs = weight.shape
    return (*weight_traits(weight), min(x.shape[0], MANY_TOKENS), outputs, inputs)
