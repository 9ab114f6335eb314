# SPDX-License-Identifier: MIT
"""Rotary position embedding (Su et al., 2021) in float32 torch, pairing element i with i + rot_dim / 2."""

from __future__ import annotations

import torch

from tokenspeed_kernel.registry import Band, anywhere, kernel


@kernel(
    "rope.neox",
    name="reference",
    needs=anywhere(),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    band=Band.REFERENCE,
)
def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate the first rot_dim elements of every head in place."""
    half = cos_sin.shape[1] // 2
    table = cos_sin[positions].float()[:, None, :]
    cos, sin = table[..., :half], table[..., half:]
    for heads in (q, k):
        low, high = heads[..., :half].float(), heads[..., half : 2 * half].float()
        turned = low * cos - high * sin, high * cos + low * sin  # both before the first write
        heads[..., :half], heads[..., half : 2 * half] = (part.to(heads.dtype) for part in turned)
