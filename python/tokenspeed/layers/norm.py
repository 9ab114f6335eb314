# SPDX-License-Identifier: MIT
"""Root-mean-square normalisation, alone or with the residual addition before it."""

from __future__ import annotations

import torch

from tokenspeed.weights import Weights
from tokenspeed_kernel import api


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis, of `size` elements."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, offset: float) -> None:
        weight = weights.vector(f"{name}.weight", size)
        # In float32: in a smaller type, a weight around zero would lose its bits to the offset.
        self.weight = weight.float() + offset if offset else weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised x, of its shape, contiguous."""
        return api.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual). `residual` may be overwritten."""
        return api.add_rms_norm(x, residual, self.weight, self.eps)
