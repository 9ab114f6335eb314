# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Seeded sampling in Triton without a sort: one program a row finds the filters' thresholds by radix search.

A row's scaled logits are at most 0, so the bits of -scaled, read as an integer, order tokens from likeliest on.
Top-k and top-p each keep the tokens up to a threshold in that order; it is found four bits a pass, counting tokens
(top-k) or summing their weights (top-p) below sixteen candidate thresholds at once. Noise is made only for tiles
that keep a token. Greedy rows stop after the first pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.registry import Band, cuda, kernel

_BLOCK = 1024


@triton.jit
def _distance(logits, token, vocab_size, peak, temperature):
    """How far below the row's largest each token lies, scaled: 0 for the likeliest, inf past the vocabulary."""
    value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
    return tl.div_rn(peak - value, temperature)


@triton.jit
def _threshold(
    logits, vocab_size, peak, temperature, goal, limit, WEIGHED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Smallest order key whose tokens up to it, none past `limit`, number at least `goal`, or weigh it if WEIGHED."""
    digit = tl.arange(0, 16)
    found = tl.zeros([], tl.int64)
    for step in range(8):
        shift = 28 - 4 * step
        bound = found + ((digit + 1).to(tl.int64) << shift) - 1
        amount = tl.zeros([16], tl.float64)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            far = _distance(logits, token, vocab_size, peak, temperature)
            key = far.to(tl.int32, bitcast=True).to(tl.int64)
            each = tl.exp(-far).to(tl.float64) if WEIGHED else tl.where(far == far, 1.0, 0.0).to(tl.float64)
            counted = (token < vocab_size) & (key <= limit)
            below = (key[None, :] <= bound[:, None]) & counted[None, :]
            amount += tl.sum(tl.where(below, each[None, :], 0.0), axis=1)
        # The first candidate that reaches the goal; rounding may leave the last one just short of it.
        first = tl.min(tl.where(amount >= goal, digit, 15), axis=0)
        found += first.to(tl.int64) << shift
    return found


@triton.jit
def _weight_up_to(logits, vocab_size, peak, temperature, limit, BLOCK: tl.constexpr):
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        far = _distance(logits, token, vocab_size, peak, temperature)
        key = far.to(tl.int32, bitcast=True).to(tl.int64)
        counted = (token < vocab_size) & (key <= limit)
        total += tl.sum(tl.where(counted, tl.exp(-far).to(tl.float64), 0.0), axis=0)
    return total


@triton.jit
def _gumbel(start, seed, position, BLOCK: tl.constexpr):
    """Noise of tokens start .. start + BLOCK, as `philox.gumbel` defines it."""
    group = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros([BLOCK // 4], tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, group, zero + low, zero + high, zero)
    # joined so that the flat order is word 0, 1, 2, 3 of group 0, then of group 1
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-08 + 2.98023223876953125e-08
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    return -tl.log(-tl.log(uniform))


# Columns of a table of parameters, one number a program: where they begin depends on how many rows there are.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions"])
def sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, out, stride, vocab_size, BLOCK: tl.constexpr
):
    """One row from logits to its token."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    temperature = tl.load(temperatures + row)
    peak = tl.full([], float("-inf"), tl.float32)
    best = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
        largest = tl.max(value, axis=0)
        at = tl.min(tl.where(value == largest, token, 0x7FFFFFFF), axis=0)
        best = tl.where(largest > peak, at, best)
        peak = tl.maximum(peak, largest)
    if (temperature > 0) & (peak > float("-inf")):
        limit = tl.full([], 0x7FFFFFFF, tl.int64)
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocab_size):
            limit = _threshold(logits, vocab_size, peak, temperature, top_k.to(tl.float64), limit, False, BLOCK)
        top_p = tl.load(top_ps + row)
        if top_p < 1:
            goal = top_p.to(tl.float64) * _weight_up_to(logits, vocab_size, peak, temperature, limit, BLOCK)
            limit = tl.minimum(limit, _threshold(logits, vocab_size, peak, temperature, goal, limit, True, BLOCK))
        min_p = tl.load(min_ps + row)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        winner = tl.full([], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            far = _distance(logits, token, vocab_size, peak, temperature)
            key = far.to(tl.int32, bitcast=True).to(tl.int64)
            kept = (key <= limit) & (tl.exp(-far) >= min_p) & (token < vocab_size)
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                score = tl.where(kept, _gumbel(start, seed, position, BLOCK) - far, float("-inf"))
                largest = tl.max(score, axis=0)
                at = tl.min(tl.where(score == largest, token, 0x7FFFFFFF), axis=0)
                best = tl.where(largest > winner, at, best)
                winner = tl.maximum(winner, largest)
    tl.store(out + row, best)


@kernel("sampling.sample", name="triton", needs=cuda(8), dtypes=(torch.float32,), band=Band.PORTABLE)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One launch, whatever the settings of the rows."""
    rows, vocab_size = logits.shape
    settings = (temperature, top_k, top_p, min_p, seeds, positions)
    if any(setting.shape != (rows,) or not setting.is_contiguous() for setting in settings):
        raise ValueError(f"every setting must be a contiguous [{rows}]")
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must have adjacent elements")
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        sample_kernel[(rows,)](logits, *settings, out, logits.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=8)
    return out
