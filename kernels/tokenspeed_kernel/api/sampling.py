# SPDX-License-Identifier: MIT
"""From logits to tokens: penalties, seeded sampling, log-probabilities. All logits are float32 [S, V]."""

from __future__ import annotations

import torch

from tokenspeed_kernel.registry import ops, solve


def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Penalise tokens already seen, in place.

    logits: float32 [S, V], changed.
    slots: int64 [S], the request slot of each row.
    output_counts: int32 [num_slots, V], how often the slot's request has produced each token.
    prompt_mask: bool [num_slots, V], whether the token stands in the slot's prompt.
    repetition: float32 [S]; a token in prompt or output has its logit divided by it if positive, else multiplied.
    frequency: float32 [S], subtracted once for each time the token was produced.
    presence: float32 [S], subtracted once if the token was produced at all.
    """
    solve(ops.SAMPLING_PENALTIES, logits.device.type, logits.dtype)(
        logits, slots, output_counts, prompt_mask, repetition, frequency, presence
    )


def token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """Make the logits of barred tokens -inf, in place.

    logits: float32 [S, V], changed.
    mask: int32 [G, ceil(V / 32)]; token v of the row is allowed where bit v % 32 of word v // 32 is set.
    rows: int64 [G], the row of logits that each row of the mask is for, distinct.
    """
    solve(ops.SAMPLING_TOKEN_MASK, logits.device.type, logits.dtype)(logits, mask, rows)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row; what is drawn depends only on the row, never on the batch or the device.

    logits: float32 [S, V], not changed.
    temperature: float32 [S]; 0 takes the largest logit, the lowest id among equals, and ignores the rest.
    top_k: int32 [S]; keeps tokens not below the k-th largest; <= 0 or >= V is off.
    top_p: float32 [S]; of what top_k left, keeps tokens whose strictly likelier rivals sum to less than top_p,
        and always the likeliest; >= 1 is off.
    min_p: float32 [S]; keeps tokens at least min_p times as likely as the likeliest; 0 is off.
    seeds: int64 [S], the request's seed.
    positions: int64 [S], the index the new token will have in its sequence.

    Among what is left, takes the largest of (logit - largest) / temperature + Gumbel noise, the lowest id among
    equals. The noise of token v is -log(-log(u)), u = min((word >> 8) * 2^-24 + 2^-25, 1 - 2^-24), where word is
    output v % 4 of Philox4x32-10 with key (seed's low, high word) and counter (v // 4, position's low, high word, 0).

    Returns int32 [S].
    """
    return solve(ops.SAMPLING_SAMPLE, logits.device.type, logits.dtype)(
        logits, temperature, top_k, top_p, min_p, seeds, positions
    )


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, top_n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under the softmax of the logits as given (raw: no temperature, no penalties).

    logits: float32 [S, V].
    tokens: int32 or int64 [S], the tokens that were chosen.
    top_n: how many of the most likely tokens to report, 0 to V.

    Returns (float32 [S] of the chosen, float32 [S, top_n] largest first, int32 [S, top_n] their ids; the lowest id
    first among equals).
    """
    return solve(ops.SAMPLING_LOGPROBS, logits.device.type, logits.dtype)(logits, tokens, top_n)
