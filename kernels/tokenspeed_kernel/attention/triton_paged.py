# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Paged attention in Triton: split-KV decode and flash prefill, chosen per row of one mixed step.

Decode rows have one query, so the heads that share a KV head form the tile's rows and the row's KV is split over
programs, whose partial results a second kernel merges (flash-decoding). Other rows run flash attention
(Dao et al., 2022) over their blocks, tile by tile, masking only where causality or the window cut a tile.
Softmax works on base-2 exponents: scores carry the factor log2(e).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.attention.metadata import AttentionMetadata, RowRange
from tokenspeed_kernel.gemm.triton_dot import dot, precision_of
from tokenspeed_kernel.quant.triton_fp8 import from_fp8
from tokenspeed_kernel.registry import Band, cuda, kernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LOG2E = 1.4426950408889634
_TILE_N = 64
_INVARIANT_TILE_M = 64
_MIN_SPLIT_TOKENS = 128
_MAX_SPLITS = 64


@triton.jit
def _attend(
    q, acc, peak, total, k_cache, v_cache, k_scales, v_scales, table, first, last, query_at, key_end,
    stride_block, CACHE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys of positions [first, last), a multiple of TILE_N apart, into the running softmax.

    q [M, D] is scaled; query_at [M] are its positions; keys at or past key_end don't exist. CAP: the soft cap in the
    scores' unit, 0 for none. CACHE: "floats", "fp8", or "scaled": fp8 with scales.
    """
    dim = tl.arange(0, TILE_D)
    whole_dim: tl.constexpr = TILE_D == HEAD_DIM
    for start in range(first, last, TILE_N):
        at = start + tl.arange(0, TILE_N)
        exists = at < key_end
        if MASKED:
            block = tl.load(table + at // BLOCK_SIZE, mask=exists, other=0)
        else:
            block = tl.load(table + at // BLOCK_SIZE)
        slot = block.to(tl.int64) * stride_block + at % BLOCK_SIZE * HEAD_DIM
        if MASKED or not whole_dim:
            there = exists[:, None] & (dim < HEAD_DIM)[None, :]
            key = tl.load(k_cache + slot[:, None] + dim[None, :], mask=there, other=0.0)
            value = tl.load(v_cache + slot[:, None] + dim[None, :], mask=there, other=0.0)
        else:
            key = tl.load(k_cache + slot[:, None] + dim[None, :])
            value = tl.load(v_cache + slot[:, None] + dim[None, :])
        if CACHE == "floats":
            key, value = key.to(q.dtype), value.to(q.dtype)
        else:
            key, value = from_fp8(key).to(q.dtype), from_fp8(value).to(q.dtype)
        scores = dot(q, tl.trans(key), None, PRECISION)
        if CACHE == "scaled":
            # A scale belongs to a row of D elements.
            scores = scores * tl.load(k_scales + slot // HEAD_DIM, mask=exists, other=0.0)[None, :]
        if CAP > 0:
            # cap * tanh(s / cap), tanh(x) = 1 - 2 / (e^(2 x) + 1)
            scores = CAP - 2 * CAP / (tl.exp(scores * (2 / CAP)) + 1)
        if MASKED:
            seen = exists[None, :] & (at[None, :] <= query_at[:, None])
            if WINDOW > 0:
                seen = seen & (at[None, :] > query_at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps peak -inf; 0 stands in for it so that no inf - inf appears.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        if CACHE == "scaled":
            weights = weights * tl.load(v_scales + slot // HEAD_DIM, mask=exists, other=0.0)[None, :]
        acc = dot(weights.to(value.dtype), value, acc, PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _with_sink(acc, peak, total, sink):
    """Fold in a key of score `sink` (base-2, a row or one for all) that has no value."""
    new_peak = tl.maximum(peak, sink)
    shrink = tl.exp2(peak - new_peak)
    return acc * shrink[:, None], new_peak, total * shrink + tl.exp2(sink - new_peak)


@triton.jit
def decode_kernel(
    q, k_cache, v_cache, k_scales, v_scales, block_tables, kv_lens, sinks, out, partial, stats, scale,
    stride_qt, stride_qh, stride_table, num_heads, num_kv_heads,
    CACHE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    GROUP: tl.constexpr, TILE_M: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, TILE_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one row's KV for one KV head. partial [R, Hq, S, D] and stats [R, Hq, S] hold unmerged splits."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    kv_len = tl.load(kv_lens + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(kv_len - WINDOW, 0) // TILE_N * TILE_N
    share = tl.cdiv(tl.cdiv(kv_len - first, NUM_SPLITS), TILE_N) * TILE_N
    begin = first + split * share
    end = tl.minimum(begin + share, kv_len)
    member = tl.arange(0, TILE_M)
    dim = tl.arange(0, TILE_D)
    head = kv_head * GROUP + member
    there = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(q + row * stride_qt + head[:, None] * stride_qh + dim[None, :], mask=there, other=0.0)
    query = (query.to(tl.float32) * scale).to(q.dtype.element_ty)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    peak = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    offset = kv_head * BLOCK_SIZE * HEAD_DIM
    query_at = tl.zeros([TILE_M], tl.int32) + kv_len - 1
    acc, peak, total = _attend(
        query, acc, peak, total, k_cache + offset, v_cache + offset,
        k_scales + kv_head * BLOCK_SIZE, v_scales + kv_head * BLOCK_SIZE, block_tables + row * stride_table,
        begin, end, query_at, end, num_kv_heads * BLOCK_SIZE * HEAD_DIM, CACHE,
        WINDOW, CAP, True, BLOCK_SIZE, HEAD_DIM, TILE_D, TILE_N, PRECISION,
    )  # fmt: skip
    if SINKS and split == 0:
        sink = tl.load(sinks + head, mask=member < GROUP, other=0.0) * 1.4426950408889634
        acc, peak, total = _with_sink(acc, peak, total, sink)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if NUM_SPLITS == 1:
        place = (row * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=there)
    else:
        slot = (row * num_heads + head) * NUM_SPLITS + split
        tl.store(partial + slot[:, None] * HEAD_DIM + dim[None, :], acc, mask=there)
        tl.store(stats + slot, tl.where(total == 0.0, float("-inf"), peak + tl.log2(total)), mask=member < GROUP)


@triton.jit
def merge_kernel(
    partial, stats, out, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, NUM_SPLITS: tl.constexpr
):  # fmt: skip
    """Weigh the splits of one query head by their share of the softmax."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, NUM_SPLITS)
    dim = tl.arange(0, TILE_D)
    log_sums = tl.load(stats + head * NUM_SPLITS + split)
    weights = tl.exp2(log_sums - tl.max(log_sums, axis=0))
    inside = dim < HEAD_DIM
    places = partial + (head * NUM_SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    parts = tl.load(places, mask=inside[None, :], other=0.0)
    merged = tl.sum(parts * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + head * HEAD_DIM + dim, merged.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row"])
def prefill_kernel(
    q, k_cache, v_cache, k_scales, v_scales, block_tables, query_start, kv_lens, sinks, out, scale,
    stride_qt, stride_qh, stride_table, num_heads, num_kv_heads, first_row,
    CACHE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    GROUP: tl.constexpr, TILE_M: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, TILE_N: tl.constexpr, PRECISION: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):  # fmt: skip
    """TILE_M queries of one row and one head. The longest tiles come first: the grid's first axis counts down.

    ONE_LOOP: all keys by the code that masks, so that what becomes of a query does not depend on its tile.
    """
    head = tl.program_id(1)
    row = (tl.program_id(2) + first_row).to(tl.int64)
    start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - start
    kv_len = tl.load(kv_lens + row)
    skipped = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_M
    if skipped < query_len:
        member = skipped + tl.arange(0, TILE_M)
        dim = tl.arange(0, TILE_D)
        there = (member < query_len)[:, None] & (dim < HEAD_DIM)[None, :]
        token = (start + member).to(tl.int64)
        query = tl.load(q + token[:, None] * stride_qt + head * stride_qh + dim[None, :], mask=there, other=0.0)
        query = (query.to(tl.float32) * scale).to(q.dtype.element_ty)
        acc = tl.zeros([TILE_M, TILE_D], tl.float32)
        peak = tl.full([TILE_M], float("-inf"), tl.float32)
        total = tl.zeros([TILE_M], tl.float32)
        context = kv_len - query_len
        query_at = context + member
        offset = head // GROUP * BLOCK_SIZE * HEAD_DIM
        k_scale_at, v_scale_at = k_scales + head // GROUP * BLOCK_SIZE, v_scales + head // GROUP * BLOCK_SIZE
        table = block_tables + row * stride_table
        stride_block = num_kv_heads * BLOCK_SIZE * HEAD_DIM
        # Keys before `whole` are seen by every query of the tile; with a window none is.
        first = 0
        whole = (context + skipped + 1) // TILE_N * TILE_N
        if WINDOW > 0:
            first = tl.maximum(context + skipped - WINDOW + 1, 0) // TILE_N * TILE_N
            whole = first
        if ONE_LOOP:
            whole = first
        end = tl.minimum(context + skipped + TILE_M, kv_len)
        acc, peak, total = _attend(
            query, acc, peak, total, k_cache + offset, v_cache + offset, k_scale_at, v_scale_at, table,
            first, whole, query_at, kv_len, stride_block, CACHE, WINDOW, CAP, False,
            BLOCK_SIZE, HEAD_DIM, TILE_D, TILE_N, PRECISION,
        )  # fmt: skip
        acc, peak, total = _attend(
            query, acc, peak, total, k_cache + offset, v_cache + offset, k_scale_at, v_scale_at, table,
            whole, end, query_at, kv_len, stride_block, CACHE, WINDOW, CAP, True,
            BLOCK_SIZE, HEAD_DIM, TILE_D, TILE_N, PRECISION,
        )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks + head) * 1.4426950408889634
            acc, peak, total = _with_sink(acc, peak, total, sink)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (token * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=there)


class _Rule(NamedTuple):
    """What decides the softmax; scale and cap carry the factor log2(e)."""

    scale: float
    window: int
    cap: float
    sinks: torch.Tensor | None


def _head_dim_fits(head_dim: int) -> bool:
    return 16 <= head_dim <= 256


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@kernel(
    "attention.paged",
    name="triton",
    needs=cuda(8),
    dtypes=_FLOATS,
    traits={"head_dim": _head_dim_fits, "block_size": _power_of_two, "kv_dtype": (*_FLOATS, torch.float8_e4m3fn)},
    band=Band.PORTABLE,
)
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Up to three launches: decode, its merge, prefill. Their number depends on the metadata's host integers only."""
    _check(q, k_cache, v_cache, meta)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rule = _Rule(scale * _LOG2E, window, softcap * _LOG2E, sinks)
    cache = _cache(k_cache, v_cache, scales)
    if meta.num_decode_rows:
        _decode(q, cache, meta, rule, out)
    if meta.num_decode_rows < meta.kv_lens.shape[0]:
        _prefill(q, cache, meta, meta.prefill_rows, rule, out)
    return out


@kernel(
    "attention.paged",
    name="triton_invariant",
    needs=cuda(8),
    dtypes=_FLOATS,
    traits={"head_dim": _head_dim_fits, "block_size": _power_of_two, "kv_dtype": (*_FLOATS, torch.float8_e4m3fn)},
    band=Band.PORTABLE,
    priority=-1,
    batch_invariant=True,
)
def invariant_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """The prefill kernel for all rows, in tiles of one size: each query meets the keys in the same tiles and order
    whatever else is in its own, and a tile that it does not see changes no bit."""
    _check(q, k_cache, v_cache, meta)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rule = _Rule(scale * _LOG2E, window, softcap * _LOG2E, sinks)
    cache = _cache(k_cache, v_cache, scales)
    for rows in (meta.decode_rows, meta.prefill_rows):
        if rows.num_rows:
            _prefill(q, cache, meta, rows, rule, out, invariant=True)
    return out


class _Cache(NamedTuple):
    """Tensors as the kernels take them: fp8 as bytes, anything in place of scales that do not exist. kind: CACHE."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor
    kind: str


def _cache(k_cache: torch.Tensor, v_cache: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None) -> _Cache:
    if k_cache.dtype != torch.float8_e4m3fn:
        return _Cache(k_cache, v_cache, k_cache, v_cache, "floats")
    k_bytes, v_bytes = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if scales is None:
        return _Cache(k_bytes, v_bytes, k_bytes, v_bytes, "fp8")
    return _Cache(k_bytes, v_bytes, *scales, "scaled")


def num_splits(num_programs: int, max_kv_len: int, num_cores: int) -> int:
    """How many parts to cut each row's KV into: a power of two that gives every core about two programs."""
    wanted = 2 * num_cores // max(num_programs, 1)
    most = min(_MAX_SPLITS, triton.cdiv(max_kv_len, _MIN_SPLIT_TOKENS))
    splits = 1
    while splits * 2 <= min(wanted, most):
        splits *= 2
    return splits


def _decode(
    q: torch.Tensor,
    cache: _Cache,
    meta: AttentionMetadata,
    rule: _Rule,
    out: torch.Tensor,
) -> None:
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    num_heads, rows = q.shape[1], meta.num_decode_rows
    splits = num_splits(rows * num_kv_heads, meta.max_kv_len, _num_cores(q.device))
    tile_d = triton.next_power_of_2(head_dim)
    partial = stats = out
    if splits > 1:
        partial = torch.empty(rows, num_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, num_heads, splits, dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    decode_kernel[(rows, num_kv_heads, splits)](
        q, *cache[:4], meta.block_tables, meta.kv_lens, rule.sinks, out, partial, stats, rule.scale,
        q.stride(0), q.stride(1), meta.block_tables.stride(0), num_heads, num_kv_heads,
        CACHE=cache.kind, WINDOW=rule.window, CAP=rule.cap, SINKS=rule.sinks is not None,
        GROUP=group, TILE_M=max(16, triton.next_power_of_2(group)), BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim, TILE_D=tile_d, TILE_N=_TILE_N, NUM_SPLITS=splits, PRECISION=precision_of(q),
        num_warps=4, num_stages=3 if q.element_size() == 2 else 2,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(rows * num_heads,)](
            partial, stats, out, HEAD_DIM=head_dim, TILE_D=tile_d, NUM_SPLITS=splits, num_warps=2
        )


def _prefill(
    q: torch.Tensor,
    cache: _Cache,
    meta: AttentionMetadata,
    rows: RowRange,
    rule: _Rule,
    out: torch.Tensor,
    invariant: bool = False,
) -> None:
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    num_heads = q.shape[1]
    half = q.element_size() == 2
    tile_m = min(128 if half and head_dim <= 128 else 64, max(16, triton.next_power_of_2(rows.max_query_len)))
    if invariant:
        tile_m = _INVARIANT_TILE_M
    grid = (triton.cdiv(rows.max_query_len, tile_m), num_heads, rows.num_rows)
    prefill_kernel[grid](
        q, *cache[:4], meta.block_tables, meta.query_start, meta.kv_lens, rule.sinks, out, rule.scale,
        q.stride(0), q.stride(1), meta.block_tables.stride(0), num_heads, num_kv_heads, rows.first,
        CACHE=cache.kind, WINDOW=rule.window, CAP=rule.cap, SINKS=rule.sinks is not None,
        GROUP=num_heads // num_kv_heads, TILE_M=tile_m, BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim, TILE_D=triton.next_power_of_2(head_dim), TILE_N=_TILE_N if half else 32,
        PRECISION=precision_of(q), ONE_LOOP=invariant, num_warps=8 if tile_m == 128 else 4, num_stages=3 if half else 2,
    )  # fmt: skip


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata) -> None:
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.shape != k_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"q [T, Hq, D] and caches [blocks, Hk, size, D] expected, got {q.shape}, {k_cache.shape}")
    if q.shape[1] % k_cache.shape[1] or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"Hq must be a multiple of Hk and caches of one dtype, "
            f"got {q.shape[1]}, {k_cache.shape[1]}, {k_cache.dtype}"
        )
    if q.stride(2) != 1 or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("heads of q must have adjacent elements, caches must be contiguous")
    if meta.block_tables.stride(1) != 1:
        raise ValueError("block_tables must have adjacent columns")


@functools.cache
def _num_cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
