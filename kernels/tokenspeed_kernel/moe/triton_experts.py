# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Experts in Triton: pairs of (token, chosen expert) sorted by expert, then two grouped products and a sum.

Sorting is a stable count and placement without atomics, so results repeat. A table of tiles, at most TILE_M pairs of
one expert each, tells a program of the products what to do; how many launches there are and how large depends on
shapes alone, so a step can be captured in a graph. The activation is fused into the first product, the token's weight
into the second; the sum adds a token's experts in the order of choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.gemm.triton_dot import dot, precision_of
from tokenspeed_kernel.moe.weights import Experts, GatedActivation
from tokenspeed_kernel.quant.packed import ROWS_LAYOUT
from tokenspeed_kernel.registry import Band, cuda, kernel

_SCAN = 1024
_INVARIANT_ROWS = 64


# Kernels are compiled anew for integers that are multiples of sixteen; the number of pairs is any.
@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(chosen, counts, num_pairs, SCAN: tl.constexpr):
    """counts[e] = how many pairs chose expert e, one program an expert."""
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for start in range(0, num_pairs, SCAN):
        at = start + tl.arange(0, SCAN)
        total += tl.sum((tl.load(chosen + at, mask=at < num_pairs, other=-1) == expert).to(tl.int32), axis=0)
    tl.store(counts + expert, total)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    chosen, counts, order, tiles, num_tiles, num_pairs, num_experts,
    TILE_M: tl.constexpr, TILE_E: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Pairs of one expert into `order`, its tiles (expert, first row, last row + 1) into `tiles`."""
    expert = tl.program_id(0)
    every = tl.arange(0, TILE_E)
    count = tl.load(counts + every, mask=every < num_experts, other=0)
    needed = (count + TILE_M - 1) // TILE_M
    first = tl.sum(tl.where(every < expert, count, 0), axis=0)
    tile = tl.sum(tl.where(every < expert, needed, 0), axis=0)
    mine = tl.sum(tl.where(every == expert, count, 0), axis=0)
    done = first
    for start in range(0, num_pairs, SCAN):
        at = start + tl.arange(0, SCAN)
        match = tl.load(chosen + at, mask=at < num_pairs, other=-1) == expert
        rank = tl.cumsum(match.to(tl.int32), axis=0)
        tl.store(order + done + rank - 1, at, mask=match)
        done += tl.sum(match.to(tl.int32), axis=0)
    for start in range(0, mine, TILE_M):
        entry = tiles + (tile + start // TILE_M) * 3
        tl.store(entry, expert)
        tl.store(entry + 1, first + start)
        tl.store(entry + 2, tl.minimum(first + start + TILE_M, first + mine))
    if expert == 0:
        tl.store(num_tiles, tl.sum(needed, axis=0))


@triton.jit
def gate_up_kernel(
    x, weight, bias, order, tiles, num_tiles, out, inner, hidden, stride_x, stride_expert, alpha, limit,
    TOP_K: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr, WHOLE_K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[row] = activation(gate, up) of the row's token and expert: one tile of rows and TILE_N inner columns."""
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        row = tl.load(tiles + tile * 3 + 1) + tl.arange(0, TILE_M)
        valid = row < tl.load(tiles + tile * 3 + 2)
        token = tl.load(order + row, mask=valid, other=0) // TOP_K
        column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        inside = column < inner
        k = tl.arange(0, TILE_K)
        source = x + token[:, None].to(tl.int64) * stride_x + k[None, :]
        gate_at = weight + expert * stride_expert + column[None, :].to(tl.int64) * hidden + k[:, None]
        up_at = gate_at + inner.to(tl.int64) * hidden
        gate = tl.zeros([TILE_M, TILE_N], tl.float32)
        up = tl.zeros([TILE_M, TILE_N], tl.float32)
        for start in range(0, hidden, TILE_K):
            there = inside[None, :]
            known = valid[:, None]
            if not WHOLE_K:
                there = there & (start + k < hidden)[:, None]
                known = known & (start + k < hidden)[None, :]
            rows = tl.load(source + start, mask=known, other=0.0)
            gate = dot(rows, tl.load(gate_at + start, mask=there, other=0.0), gate, PRECISION)
            up = dot(rows, tl.load(up_at + start, mask=there, other=0.0), up, PRECISION)
        if BIASED:
            start_bias = bias + expert * 2 * inner + column
            gate += tl.load(start_bias, mask=inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(start_bias + inner, mask=inside, other=0.0).to(tl.float32)[None, :]
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
        else:
            result = gate / (1.0 + tl.exp(-gate)) * up
        place = out + row[:, None].to(tl.int64) * inner + column[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit
def down_kernel(
    x, weight, bias, order, tiles, num_tiles, weights, out, inner, hidden, stride_expert,
    BIASED: tl.constexpr, WHOLE_K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[pair] = (x[row] @ down.T + bias) * weight of the pair: one tile of rows and TILE_N outputs."""
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        row = tl.load(tiles + tile * 3 + 1) + tl.arange(0, TILE_M)
        valid = row < tl.load(tiles + tile * 3 + 2)
        pair = tl.load(order + row, mask=valid, other=0)
        column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        inside = column < hidden
        k = tl.arange(0, TILE_K)
        source = x + row[:, None].to(tl.int64) * inner + k[None, :]
        down_at = weight + expert * stride_expert + column[None, :].to(tl.int64) * inner + k[:, None]
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        for start in range(0, inner, TILE_K):
            there = inside[None, :]
            known = valid[:, None]
            if not WHOLE_K:
                there = there & (start + k < inner)[:, None]
                known = known & (start + k < inner)[None, :]
            rows = tl.load(source + start, mask=known, other=0.0)
            acc = dot(rows, tl.load(down_at + start, mask=there, other=0.0), acc, PRECISION)
        if BIASED:
            acc += tl.load(bias + expert * hidden + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc *= tl.load(weights + pair, mask=valid, other=0.0)[:, None]
        place = out + pair[:, None].to(tl.int64) * hidden + column[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit
def sum_kernel(pairs, out, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = the sum of its TOP_K rows of `pairs`, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(pairs + (token * TOP_K + k) * hidden + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


class _Sorted(NamedTuple):
    """order: int32 [P], pairs by expert; tiles: int32 [most, 3]; num_tiles: int32 [1], how many of them are used."""

    order: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    tile_m: int


def _sort(chosen: torch.Tensor, num_experts: int, tile_m: int) -> _Sorted:
    num_pairs = chosen.numel()
    # Every expert that is chosen may leave one tile that is not full.
    most = num_pairs // tile_m + min(num_pairs, num_experts)
    counts, order, tiles, num_tiles = aligned_parts([num_experts, num_pairs, 3 * most, 1], chosen.device)
    count_kernel[(num_experts,)](chosen, counts, num_pairs, SCAN=_SCAN, num_warps=4)
    place_kernel[(num_experts,)](
        chosen, counts, order, tiles, num_tiles, num_pairs, num_experts,
        TILE_M=tile_m, TILE_E=triton.next_power_of_2(num_experts), SCAN=_SCAN, num_warps=4,
    )  # fmt: skip
    return _Sorted(order, tiles.view(most, 3), num_tiles, tile_m)


def aligned_parts(sizes: list[int], device: torch.device) -> list[torch.Tensor]:
    """int32 tensors of these sizes in one allocation, each at a multiple of 16 bytes: kernels are compiled anew for
    pointers that are at none."""
    padded = [-(-size // 4) * 4 for size in sizes]
    whole = torch.empty(sum(padded), dtype=torch.int32, device=device)
    return [part[:size] for part, size in zip(whole.split(padded), sizes)]


def tile_rows(num_pairs: int, num_experts: int, half: bool) -> int:
    """Rows of one tile: as many as an expert has on average, within what the matrix units take."""
    average = triton.next_power_of_2(max(1, num_pairs // num_experts))
    return max(16, min(128 if half else 64, average))


def _fastest(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Tiles as the number of pairs asks for."""
    tile_m = tile_rows(chosen.numel(), experts.down.shape[0], x.element_size() == 2)
    return _run(x, weights, chosen, experts, tile_m)


def _invariant(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Tiles of one size, so that the matrix units sum a pair in one way."""
    return _run(x, weights, chosen, experts, _INVARIANT_ROWS)


def _run(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Experts, tile_m: int) -> torch.Tensor:
    """Five launches."""
    _check(x, weights, chosen, experts)
    tokens, top_k = chosen.shape
    num_experts, num_outputs, inner = experts.down.shape
    out = torch.empty(tokens, num_outputs, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    work = _sort(chosen, num_experts, tile_m)
    middle = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    pairs = torch.empty(tokens * top_k, num_outputs, dtype=x.dtype, device=x.device)
    _gate_up(x, experts, work, top_k, middle)
    _down(middle, weights, experts, work, pairs)
    block = min(1024, triton.next_power_of_2(num_outputs))
    sum_kernel[(tokens, triton.cdiv(num_outputs, block))](
        pairs, out, num_outputs, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    return out


def _gate_up(x: torch.Tensor, experts: Experts, work: _Sorted, top_k: int, middle: torch.Tensor) -> None:
    (matrix,), activation = experts.gate_up, experts.activation
    hidden, inner = matrix.shape[2], middle.shape[1]
    tile_n, tile_k = (64, 64) if x.element_size() == 2 else (32, 32)
    gate_up_kernel[(work.tiles.shape[0], triton.cdiv(inner, tile_n))](
        x, matrix.data, experts.gate_up_bias, work.order, work.tiles, work.num_tiles, middle,
        inner, hidden, x.stride(0), matrix.data.stride(0), *_clamp(activation),
        TOP_K=top_k, BIASED=experts.gate_up_bias is not None, CLAMPED=activation.kind == "swiglu_clamped",
        WHOLE_K=hidden % tile_k == 0, TILE_M=work.tile_m, TILE_N=tile_n, TILE_K=tile_k, PRECISION=precision_of(x),
        num_warps=8 if work.tile_m == 128 else 4, num_stages=4 if work.tile_m < 64 else 3,
    )  # fmt: skip


def _down(middle: torch.Tensor, weights: torch.Tensor, experts: Experts, work: _Sorted, pairs: torch.Tensor) -> None:
    _, hidden, inner = experts.down.shape
    tile_n, tile_k = (128, 64) if middle.element_size() == 2 else (32, 32)
    down_kernel[(work.tiles.shape[0], triton.cdiv(hidden, tile_n))](
        middle, experts.down.data, experts.down_bias, work.order, work.tiles, work.num_tiles, weights, pairs,
        inner, hidden, experts.down.data.stride(0),
        BIASED=experts.down_bias is not None, WHOLE_K=inner % tile_k == 0,
        TILE_M=work.tile_m, TILE_N=tile_n, TILE_K=tile_k, PRECISION=precision_of(middle),
        num_warps=8 if work.tile_m == 128 else 4, num_stages=4 if work.tile_m < 64 else 3,
    )  # fmt: skip


def _clamp(activation: GatedActivation) -> tuple[float, float]:
    clamped = activation.kind == "swiglu_clamped"
    return (activation.alpha, activation.limit) if clamped else (0.0, 0.0)


def _check(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> None:
    if x.stride(1) != 1 or x.shape[1] != experts.gate_up[0].shape[2]:
        raise ValueError(f"x must be [T, {experts.gate_up[0].shape[2]}] with adjacent elements, got {x.shape}")
    if chosen.dtype != torch.int32 or not chosen.is_contiguous() or weights.shape != chosen.shape:
        raise ValueError(f"chosen must be contiguous int32 of the weights' shape, got {chosen.dtype} {chosen.shape}")
    if weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"weights must be contiguous float32, got {weights.dtype}")
    if experts.gate_up[0].shape[1] != 2 * experts.down.shape[2]:
        raise ValueError(f"gate and up {experts.gate_up[0].shape} do not go with down {experts.down.shape}")


def _rows(layouts: tuple[str, ...]) -> bool:
    return all(layout == ROWS_LAYOUT for layout in layouts)


for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    _name = str(_dtype).removeprefix("torch.")
    for _suffix, _fn in (("", _fastest), ("_invariant", _invariant)):
        kernel(
            "moe.experts",
            name=f"triton_{_name}{_suffix}",
            needs=cuda(8),
            dtypes={_dtype},
            traits={"weight_formats": {(_name, _name)}, "weight_layouts": _rows},
            band=Band.PORTABLE,
            priority=-1 if _suffix else 0,
            batch_invariant=bool(_suffix),
        )(_fn)
