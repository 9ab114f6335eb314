# SPDX-License-Identifier: MIT
"""Penalties, sampling and log-probabilities in plain torch: the definition every backend follows.

Filters keep or drop a token by its value alone, so equal logits share their fate and no sort order matters.
Probability sums are float64, so that a faster solution with another summation order meets the same boundaries.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.registry import Band, anywhere, kernel
from tokenspeed_kernel.sampling.philox import gumbel

_LOGITS = (torch.float32,)


@kernel("sampling.penalties", name="reference", needs=anywhere(), dtypes=_LOGITS, band=Band.REFERENCE)
def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Repetition first, then frequency and presence."""
    counts = output_counts[slots]
    produced = counts > 0
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalised = torch.where(produced | prompt_mask[slots], repeated, logits)
    penalised = penalised - frequency[:, None] * counts
    logits.copy_(torch.where(produced, penalised - presence[:, None], penalised))


@kernel("sampling.token_mask", name="reference", needs=anywhere(), dtypes=_LOGITS, band=Band.REFERENCE)
def token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """Bits to booleans, then one masked fill."""
    bits = mask[:, :, None] >> torch.arange(32, device=mask.device) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


@kernel("sampling.sample", name="reference", needs=anywhere(), dtypes=_LOGITS, band=Band.REFERENCE)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Greedy rows take the first largest logit; the others the largest of filtered, scaled logit plus noise."""
    greedy = temperature <= 0
    scaled = scale_logits(logits, temperature)
    kept = keep_min_p(keep_top_p(keep_top_k(scaled, top_k), top_p), min_p)
    noisy = kept + gumbel(seeds, positions, logits.shape[1])
    return torch.where(greedy, first_argmax(logits), first_argmax(noisy)).int()


def scale_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logit - largest) / temperature: the largest is 0, so that no temperature, however small, overflows."""
    largest = logits.amax(dim=1, keepdim=True)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    return (logits - largest) / torch.where(temperature <= 0, 1.0, temperature)[:, None]


def first_argmax(values: torch.Tensor) -> torch.Tensor:
    """int64 [S]: the lowest index of every row's maximum; 0 for a row of -inf."""
    index = torch.arange(values.shape[1], device=values.device)
    at_max = values == values.amax(dim=1, keepdim=True)
    return torch.where(at_max, index, values.shape[1] - 1).amin(dim=1)


def keep_top_k(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Tokens not below the k-th largest value; the others become -inf. k <= 0 or k >= V keeps all."""
    vocab_size = scaled.shape[1]
    off = (top_k <= 0) | (top_k >= vocab_size)
    rank = torch.where(off, vocab_size, top_k).long() - 1
    threshold = scaled.sort(dim=1, descending=True).values.gather(1, rank[:, None])
    return scaled.masked_fill((scaled < threshold) & ~off[:, None], float("-inf"))


def keep_top_p(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Tokens whose strictly likelier rivals sum to less than p (of what top-k left); the likeliest always stays."""
    probabilities = scaled.double().softmax(dim=1)
    ordered = probabilities.sort(dim=1, descending=True).values
    likelier = ordered.cumsum(dim=1) - ordered
    inside = likelier < top_p.double()[:, None]
    inside[:, 0] = True
    threshold = ordered.masked_fill(~inside, 2.0).amin(dim=1, keepdim=True)
    drop = (probabilities < threshold) & (top_p < 1)[:, None]
    return scaled.masked_fill(drop, float("-inf"))


def keep_min_p(scaled: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Tokens at least min_p times as likely as the likeliest."""
    relative = (scaled - scaled.amax(dim=1, keepdim=True)).double().exp()
    return scaled.masked_fill(relative < min_p.double()[:, None], float("-inf"))


@kernel("sampling.logprobs", name="reference", needs=anywhere(), dtypes=_LOGITS, band=Band.REFERENCE)
def logprobs(logits: torch.Tensor, tokens: torch.Tensor, top_n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log_softmax; among equal values the lowest id ranks first."""
    values = logits.log_softmax(dim=1)
    chosen = values.gather(1, tokens.long()[:, None])[:, 0]
    ordered = values.sort(dim=1, descending=True, stable=True)
    return chosen, ordered.values[:, :top_n].contiguous(), ordered.indices[:, :top_n].int().contiguous()
