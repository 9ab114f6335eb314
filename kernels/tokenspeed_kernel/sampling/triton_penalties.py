# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""The three penalties in one pass over the logits, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.registry import Band, cuda, kernel

_BLOCK = 1024


# Columns of a table of parameters, one number a program: where they begin depends on how many rows there are.
@triton.jit(do_not_specialize_on_alignment=["slots", "repetition", "frequency", "presence"])
def penalties_kernel(
    logits, slots, output_counts, prompt_mask, repetition, frequency, presence, vocab_size, BLOCK: tl.constexpr
):
    """A tile of one row; counts and mask are the rows of its slot."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    seen_at = tl.load(slots + row) * vocab_size + token
    count = tl.load(output_counts + seen_at, mask=inside, other=0)
    in_prompt = tl.load(prompt_mask + seen_at, mask=inside, other=0) != 0
    value = tl.load(logits + row * vocab_size + token, mask=inside, other=0.0)
    factor = tl.load(repetition + row)
    repeated = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value = tl.where(in_prompt | (count > 0), repeated, value)
    value -= tl.load(frequency + row) * count.to(tl.float32)
    value = tl.where(count > 0, value - tl.load(presence + row), value)
    tl.store(logits + row * vocab_size + token, value, mask=inside)


@kernel("sampling.penalties", name="triton", needs=cuda(8), dtypes=(torch.float32,), band=Band.PORTABLE)
def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """One launch."""
    rows, vocab_size = logits.shape
    if output_counts.shape[1] != vocab_size or prompt_mask.shape != output_counts.shape:
        raise ValueError(f"output_counts and prompt_mask must be [num_slots, {vocab_size}], got {output_counts.shape}")
    if not (logits.is_contiguous() and output_counts.is_contiguous() and prompt_mask.is_contiguous()):
        raise ValueError("logits, output_counts and prompt_mask must be contiguous")
    if rows:
        penalties_kernel[(rows, triton.cdiv(vocab_size, _BLOCK))](
            logits,
            slots,
            output_counts,
            prompt_mask.view(torch.uint8),
            repetition,
            frequency,
            presence,
            vocab_size,
            BLOCK=_BLOCK,
            num_warps=4,
        )
