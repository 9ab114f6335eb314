# SPDX-License-Identifier: MIT
"""Penalties, sampling and log-probabilities on the CPU; the work is in csrc/cpu/sampling.cc and reductions.h."""

from __future__ import annotations

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.registry import Band, cpu, kernel

_LOGITS = (torch.float32,)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The tensor's address; ValueError unless it is contiguous and of this dtype and shape."""
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    return tensor.data_ptr()


@kernel("sampling.penalties", name="cpu", needs=cpu(), dtypes=_LOGITS, band=Band.NATIVE)
def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Only tokens that were seen are touched. ValueError for a slot outside the tables."""
    rows, vocab = logits.shape
    num_slots = output_counts.shape[0]
    _cpu.penalties(
        _check("logits", logits, torch.float32, rows, vocab),
        rows,
        vocab,
        _check("slots", slots, torch.int64, rows),
        num_slots,
        _check("output_counts", output_counts, torch.int32, num_slots, vocab),
        _check("prompt_mask", prompt_mask, torch.bool, num_slots, vocab),
        _check("repetition", repetition, torch.float32, rows),
        _check("frequency", frequency, torch.float32, rows),
        _check("presence", presence, torch.float32, rows),
    )


@kernel("sampling.token_mask", name="cpu", needs=cpu(), dtypes=_LOGITS, band=Band.NATIVE)
def token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """Words of all ones are skipped. ValueError for a row outside the logits."""
    num_rows, vocab = logits.shape
    count = rows.shape[0]
    _cpu.token_mask(
        _check("logits", logits, torch.float32, num_rows, vocab),
        num_rows,
        vocab,
        _check("mask", mask, torch.int32, count, -(-vocab // 32)),
        _check("rows", rows, torch.int64, count),
        count,
    )


@kernel("sampling.sample", name="cpu", needs=cpu(), dtypes=_LOGITS, band=Band.NATIVE)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Thresholds instead of sorts; noise only where a token can still win."""
    rows, vocab = logits.shape
    if vocab == 0:
        raise ValueError("logits must have at least one column")
    tokens = torch.empty(rows, dtype=torch.int32)
    _cpu.sample(
        _check("logits", logits, torch.float32, rows, vocab),
        rows,
        vocab,
        _check("temperature", temperature, torch.float32, rows),
        _check("top_k", top_k, torch.int32, rows),
        _check("top_p", top_p, torch.float32, rows),
        _check("min_p", min_p, torch.float32, rows),
        _check("seeds", seeds, torch.int64, rows),
        _check("positions", positions, torch.int64, rows),
        tokens.data_ptr(),
    )
    return tokens


@kernel("sampling.logprobs", name="cpu", needs=cpu(), dtypes=_LOGITS, band=Band.NATIVE)
def logprobs(logits: torch.Tensor, tokens: torch.Tensor, top_n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log_softmax at the chosen token and at the top_n largest. ValueError for a token or top_n out of range."""
    rows, vocab = logits.shape
    if not 0 <= top_n <= vocab:
        raise ValueError(f"top_n must be in [0, {vocab}], got {top_n}")
    wide = tokens.dtype is torch.int64
    chosen = torch.empty(rows, dtype=torch.float32)
    top_values = torch.empty((rows, top_n), dtype=torch.float32)
    top_ids = torch.empty((rows, top_n), dtype=torch.int32)
    _cpu.logprobs(
        _check("logits", logits, torch.float32, rows, vocab),
        rows,
        vocab,
        _check("tokens", tokens, torch.int64 if wide else torch.int32, rows),
        wide,
        top_n,
        chosen.data_ptr(),
        top_values.data_ptr(),
        top_ids.data_ptr(),
    )
    return chosen, top_values, top_ids
