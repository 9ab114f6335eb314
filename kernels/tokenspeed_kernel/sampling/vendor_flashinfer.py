# SPDX-License-Identifier: MIT
"""Sampling with FlashInfer's filters (Ye et al., 2025) and our noise, for who has its package and asks for it.

FlashInfer's own draws depend on a row's place in the batch, which nobody's tokens may. So it says which tokens top-k
and top-p leave, and the draw among them is that of every other solution: the noise of a token is its seed's and
position's. Its sums are float32, so that a token on the very edge of top-p may fall on the other side than elsewhere.
Its kernels are compiled at their first call, which warming up makes.
"""

from __future__ import annotations

import importlib.util

import torch

from tokenspeed_kernel.registry import Band, cuda, kernel
from tokenspeed_kernel.registry.platform import Platform
from tokenspeed_kernel.sampling.reference import scale_logits


def _installed(_platform: Platform) -> str | None:
    found = importlib.util.find_spec("flashinfer") is not None
    return None if found else "the package flashinfer-python is not installed"


@kernel(
    "sampling.sample",
    name="flashinfer",
    needs=cuda(8, also=_installed),
    dtypes=(torch.float32,),
    # Never chosen unasked.
    band=Band.REFERENCE,
    priority=-1,
)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Two filters, then one launch that draws."""
    from flashinfer.sampling import top_k_mask_logits, top_p_renorm_probs

    from tokenspeed_kernel.sampling import triton_sample

    vocab_size = logits.shape[1]
    scaled = scale_logits(logits, temperature)
    wanted = torch.where((top_k <= 0) | (top_k >= vocab_size), vocab_size, top_k)
    probabilities = top_p_renorm_probs(top_k_mask_logits(scaled, wanted).softmax(dim=1), top_p.clamp(min=1e-9))
    # The likeliest stay whatever is asked; greedy rows are not filtered.
    barred = (probabilities == 0) & (scaled < 0) & (temperature > 0)[:, None]
    no_top_k, no_top_p = torch.zeros_like(top_k), torch.ones_like(top_p)
    left = logits.masked_fill(barred, float("-inf"))
    return triton_sample.sample(left, temperature, no_top_k, no_top_p, min_p, seeds, positions)
