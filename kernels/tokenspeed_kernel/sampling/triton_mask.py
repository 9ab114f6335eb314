# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Bars tokens by a bit mask, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.registry import Band, cuda, kernel

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["mask", "rows"])
def token_mask_kernel(logits, mask, rows, vocab_size, num_words, BLOCK: tl.constexpr):
    """A tile of one masked row; only barred tokens are written."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(mask + index * num_words + token // 32, mask=inside, other=-1)
    barred = ((word >> (token % 32)) & 1) == 0
    row = tl.load(rows + index)
    tl.store(logits + row * vocab_size + token, float("-inf"), mask=inside & barred)


@kernel("sampling.token_mask", name="triton", needs=cuda(8), dtypes=(torch.float32,), band=Band.PORTABLE)
def token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """One launch."""
    vocab_size, num_words = logits.shape[1], mask.shape[1]
    if num_words != triton.cdiv(vocab_size, 32):
        raise ValueError(f"mask must have {triton.cdiv(vocab_size, 32)} words a row, got {num_words}")
    if not (logits.is_contiguous() and mask.is_contiguous()):
        raise ValueError("logits and mask must be contiguous")
    if mask.shape[0]:
        token_mask_kernel[(mask.shape[0], triton.cdiv(vocab_size, _BLOCK))](
            logits, mask, rows, vocab_size, num_words, BLOCK=_BLOCK, num_warps=4
        )
