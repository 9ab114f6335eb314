# SPDX-License-Identifier: MIT
"""Operations of a transformer layer outside attention, and the preparation of weights for a device."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from tokenspeed_kernel.gemm import composed
from tokenspeed_kernel.gemm.signature import product_traits
from tokenspeed_kernel.quant.packed import ROUNDED_LAYOUT, PackedWeight, Weight, weight_traits
from tokenspeed_kernel.registry import explain, ops, solve

LEAST_ADDED_ROWS = 6144
"""Measured on an H200 with Qwen3-8B: a layer of 8,192 rows takes 1.9 % less time; with 4,096 rows, what the norms save
the products lose."""


def prepare_weight(weight: Weight, device: torch.device | str, dtype: torch.dtype | None = None) -> Weight:
    """Re-pack a weight once, at load, into the form that `linear` and `embedding` read fastest on `device`.

    weight: float32, bfloat16 or float16 [N, K], or a PackedWeight in layout "blocks", on the CPU or on
        `device` already.
    device: where it will be used.
    dtype: activations' dtype there; a device that keeps no packed weights dequantises to it. None: bfloat16 on
        "cuda", float32 on "cpu".

    Returns the weight on `device`; its values are unchanged except for rounding to `dtype` where dequantised.
    """
    where = torch.device(device)
    if dtype is None:
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    data = weight if isinstance(weight, torch.Tensor) else weight.data
    if isinstance(weight, PackedWeight) and weight.rounding is not None and not rounds_inputs(where.type):
        weight = replace(weight, rounding=None)
    return solve(ops.QUANT_PREPARE, where.type, data.dtype, weight_traits(weight)[0])(weight, where, dtype)


@functools.cache
def rounds_inputs(device_type: str) -> bool:
    """Whether products with fp8 weights on this type of device round their inputs to fp8 where the weight asks."""
    if device_type == "cpu":
        return False
    return any(
        verdict.verdict == "chosen"
        for verdict in explain("gemm.linear", device=device_type, weight_layout=ROUNDED_LAYOUT)
    )


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Matrix product x @ weight.T + bias.

    x: [T, K], float32, bfloat16 or float16.
    weight: [N, K], dense or packed, as `prepare_weight` returned it. With `columns`, x's columns are taken in that
        order; with `rounding`, x is rounded to fp8 first.
    bias: [N] or None.

    Returns [T, N] in x's dtype, accumulated in float32.
    """
    x = _ordered(x, weight)
    return solve(ops.GEMM_LINEAR, x.device.type, x.dtype, *product_traits(x, weight))(x, weight, bias)


def linear_silu_and_mul(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up where [gate, up] = x @ weight.T + bias.

    x: [T, K], float32, bfloat16 or float16.
    weight: [2 * I, K], the gate's rows then up's, dense or packed, as `prepare_weight` returned it.
    bias: [2 * I] or None.

    Returns [T, I] in x's dtype, accumulated in float32.
    """
    x = _ordered(x, weight)
    return solve(ops.GEMM_LINEAR_SILU, x.device.type, x.dtype, *product_traits(x, weight))(x, weight, bias)


def linear_add(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """Matrix product with what it is added to, residual + x @ weight.T + bias.

    x, weight, bias: as `linear` takes them.
    residual: [T, N] in x's dtype, contiguous; overwritten with the sum.

    Returns the residual.
    """
    x = _ordered(x, weight)
    solution = solve(ops.GEMM_LINEAR_ADD, x.device.type, x.dtype, *product_traits(x, weight))
    return solution(x, weight, bias, residual)


def adds_within(x: torch.Tensor, weight: Weight) -> bool:
    """Whether `linear_add` with so many rows as x has takes less time than `linear` and then `add_rms_norm` instead of
    `rms_norm`."""
    if not x.is_cuda or x.shape[0] < LEAST_ADDED_ROWS:
        return False
    solution = solve(ops.GEMM_LINEAR_ADD, x.device.type, x.dtype, *product_traits(x, weight))
    return solution is not composed.linear_add


def logits(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Scores of a vocabulary, x @ weight.T.

    x: [S, K], float32, bfloat16 or float16.
    weight: [V, K], dense or packed, as `prepare_weight` returned it.

    Returns float32 [S, V].
    """
    x = _ordered(x, weight)
    return solve(ops.GEMM_LOGITS, x.device.type, x.dtype, *product_traits(x, weight))(x, weight)


def _ordered(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Inputs in the order of the weight's columns."""
    if isinstance(weight, PackedWeight) and weight.columns is not None:
        return x.index_select(1, weight.columns)
    return x


def linear_heads(x: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
    """A product of its own for every head: out[:, h] = x[:, h] @ weight[h].T.

    x: [T, Hq, K]; tokens and heads may be strided, the elements of a head must be adjacent.
    weight: [Hq * N, K], the heads' matrices on top of each other, as `prepare_weight` returned it.
    out: [T, Hq, N] in x's dtype, strided as x may be; written. Accumulated in float32.
    """
    solve(ops.GEMM_HEADS, x.device.type, x.dtype, *weight_traits(weight), out.shape[2])(x, weight, out)


def embedding(token_ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a table.

    token_ids: int32 or int64 [T], each in [0, N).
    weight: [N, K], dense or packed, as `prepare_weight` returned it.
    dtype: of the result.

    Returns [T, K].
    """
    return solve(ops.GEMM_EMBEDDING, token_ids.device.type, dtype, *weight_traits(weight))(token_ids, weight, dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm, x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32.

    x: [..., H]; rows may be strided, elements of a row must be adjacent.
    weight: [H], float32 or x's dtype.
    eps: added to the mean of squares.

    Returns a contiguous tensor of x's shape and dtype.
    """
    return solve(ops.NORM_RMS, x.device.type, x.dtype, weight.shape[0], weight.dtype)(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual addition and the norm that follows it.

    x, residual: [T, H], one dtype.
    weight: [H], float32 or x's dtype.
    eps: added to the mean of squares.

    Returns (rms_norm(x + residual), x + residual). `residual` may be overwritten with the sum and returned;
    use only what is returned. `x` is not changed.
    """
    return solve(ops.NORM_ADD_RMS, x.device.type, x.dtype, weight.shape[0], weight.dtype)(x, residual, weight, eps)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:].

    x: [T, 2 * I], gate then up.

    Returns [T, I] in x's dtype.
    """
    return solve(ops.ACTIVATION_SILU_AND_MUL, x.device.type, x.dtype)(x)


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> None:
    """Rotate queries and keys in place.

    q: [T, Hq, D]; k: [T, Hk, D], the same dtype. Tokens and heads may be strided (views into a fused projection);
        the elements of a head must be adjacent.
    positions: int64 [T], each in [0, max_pos).
    cos_sin: float32 [max_pos, rot_dim]; a row holds rot_dim / 2 cosines, then as many sines. rot_dim <= D;
        elements past it are left alone.
    interleaved: element 2 i pairs with 2 i + 1 (GPT-J order); otherwise i with i + rot_dim / 2 (GPT-NeoX order).
    """
    op = ops.ROPE_GPTJ if interleaved else ops.ROPE_NEOX
    solve(op, q.device.type, q.dtype, q.shape[2], cos_sin.shape[1])(q, k, positions, cos_sin)
