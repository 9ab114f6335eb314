# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Multi-head latent attention in Triton: split-KV decode and flash prefill over one cached vector a token.

A tile's rows are queries times heads, since all heads read the same keys: a tile of the cache is loaded once and
multiplied twice, as keys (latent and rotated part) and as values (latent part). Decode rows are split over programs
and merged as in `triton_paged`. Softmax works on base-2 exponents: scores carry the factor log2(e).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.attention.metadata import AttentionMetadata, RowRange
from tokenspeed_kernel.attention.triton_paged import _num_cores, _power_of_two, merge_kernel, num_splits
from tokenspeed_kernel.gemm.triton_dot import dot, precision_of
from tokenspeed_kernel.quant.triton_fp8 import from_fp8
from tokenspeed_kernel.registry import Band, cuda, kernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
_LOG2E = 1.4426950408889634


@triton.jit
def _attend(
    q_latent, q_key, acc, peak, total, cache, table, first, last, query_at, MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, KEY: tl.constexpr, TILE_L: tl.constexpr, TILE_K: tl.constexpr,
    TILE_N: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Fold the keys of positions [first, last) into the running softmax; unmasked, all are whole tiles and visible."""
    dim_l = tl.arange(0, TILE_L)
    dim_k = tl.arange(0, TILE_K)
    for start in range(first, last, TILE_N):
        at = start + tl.arange(0, TILE_N)
        exists = at < last
        if MASKED:
            block = tl.load(table + at // BLOCK_SIZE, mask=exists, other=0)
        else:
            block = tl.load(table + at // BLOCK_SIZE)
        vector = cache + (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE)[:, None] * (LATENT + KEY)
        if MASKED or TILE_L != LATENT or TILE_K != KEY:
            latent = tl.load(vector + dim_l[None, :], mask=exists[:, None] & (dim_l < LATENT)[None, :], other=0)
            key = tl.load(vector + LATENT + dim_k[None, :], mask=exists[:, None] & (dim_k < KEY)[None, :], other=0)
        else:
            latent = tl.load(vector + dim_l[None, :])
            key = tl.load(vector + LATENT + dim_k[None, :])
        if FP8:
            latent, key = from_fp8(latent).to(q_latent.dtype), from_fp8(key).to(q_latent.dtype)
        scores = dot(q_latent, tl.trans(latent), None, PRECISION)
        scores = dot(q_key, tl.trans(key), scores, PRECISION)
        if MASKED:
            scores = tl.where(exists[None, :] & (at[None, :] <= query_at[:, None]), scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps peak -inf; 0 stands in for it so that no inf - inf appears.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = dot(weights.to(latent.dtype), latent, acc * shrink[:, None], PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def latent_kernel(
    q, cache, block_tables, query_start, kv_lens, out, partial, stats, scale,
    stride_qt, stride_qh, stride_table, num_heads, first_row,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, KEY: tl.constexpr,
    TILE_L: tl.constexpr, TILE_K: tl.constexpr, TILE_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, FP8: tl.constexpr, ONE_LOOP: tl.constexpr,
):  # fmt: skip
    """QUERIES queries of one row times HEADS heads over one split of the row's positions.

    partial [T, Hq, S, LATENT] and stats [T, Hq, S] hold unmerged splits; with several, every row has one query.
    ONE_LOOP: all keys by the code that masks, so that what becomes of a query does not depend on its tile.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (tl.program_id(2) // NUM_SPLITS + first_row).to(tl.int64)
    split = tl.program_id(2) % NUM_SPLITS
    start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - start
    kv_len = tl.load(kv_lens + row)
    skipped = tile * QUERIES
    if skipped < query_len:
        member = tl.arange(0, HEADS * QUERIES)
        query = skipped + member // HEADS
        head = tl.program_id(1) * HEADS + member % HEADS
        there = (query < query_len) & (head < num_heads)
        dim_l = tl.arange(0, TILE_L)
        dim_k = tl.arange(0, TILE_K)
        place = (start + query).to(tl.int64) * num_heads + head
        vector = q + ((start + query).to(tl.int64) * stride_qt + head * stride_qh)[:, None]
        kind = q.dtype.element_ty
        there_l = there[:, None] & (dim_l < LATENT)[None, :]
        q_latent = tl.load(vector + dim_l[None, :], mask=there_l, other=0.0)
        q_key = tl.load(vector + LATENT + dim_k[None, :], mask=there[:, None] & (dim_k < KEY)[None, :], other=0.0)
        q_latent = (q_latent.to(tl.float32) * scale).to(kind)
        q_key = (q_key.to(tl.float32) * scale).to(kind)
        acc = tl.zeros([HEADS * QUERIES, TILE_L], tl.float32)
        peak = tl.full([HEADS * QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([HEADS * QUERIES], tl.float32)
        context = kv_len - query_len
        share = tl.cdiv(tl.cdiv(kv_len, NUM_SPLITS), TILE_N) * TILE_N
        first = split * share
        last = tl.minimum(first + share, tl.minimum(context + skipped + QUERIES, kv_len))
        # Tiles before `whole` are seen by every query of the tile.
        whole = tl.maximum(tl.minimum((context + skipped + 1) // TILE_N * TILE_N, last // TILE_N * TILE_N), first)
        if ONE_LOOP:
            whole = first
        table = block_tables + row * stride_table
        acc, peak, total = _attend(
            q_latent, q_key, acc, peak, total, cache, table, first, whole, context + query,
            False, BLOCK_SIZE, LATENT, KEY, TILE_L, TILE_K, TILE_N, PRECISION, FP8,
        )  # fmt: skip
        acc, peak, total = _attend(
            q_latent, q_key, acc, peak, total, cache, table, whole, last, context + query,
            True, BLOCK_SIZE, LATENT, KEY, TILE_L, TILE_K, TILE_N, PRECISION, FP8,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if NUM_SPLITS == 1:
            tl.store(out + place[:, None] * LATENT + dim_l[None, :], acc.to(kind), mask=there_l)
        else:
            slot = place * NUM_SPLITS + split
            tl.store(partial + slot[:, None] * LATENT + dim_l[None, :], acc, mask=there_l)
            tl.store(stats + slot, tl.where(total == 0.0, float("-inf"), peak + tl.log2(total)), mask=there)


def _latent_fits(dim: int) -> bool:
    return 16 <= dim <= 512


def _key_fits(dim: int) -> bool:
    return 16 <= dim <= 128


@kernel(
    "attention.mla",
    name="triton",
    needs=cuda(8),
    dtypes=_FLOATS,
    traits={
        "latent_dim": _latent_fits,
        "key_dim": _key_fits,
        "block_size": _power_of_two,
        "kv_dtype": (*_FLOATS, _FP8),
    },
    band=Band.PORTABLE,
)
def latent_attention(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, latent_dim: int
) -> torch.Tensor:
    """Up to three launches: decode, its merge, prefill. Their number depends on the metadata's host integers only."""
    out = _checked(q, cache, meta, latent_dim)
    if meta.num_decode_rows:
        _attend_decodes(q, cache, meta, scale, out)
    if meta.prefill_rows.num_rows:
        _launch(q, cache, meta, scale, out, _square(q, meta.prefill_rows))
    return out


def _attend_decodes(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, out: torch.Tensor
) -> None:
    """The rows of one query: two launches at most, into their part of out [T, Hq, latent_dim]."""
    num_heads = q.shape[1]
    tile_m = max(16, min(triton.next_power_of_2(num_heads), 64 if q.element_size() == 2 else 16))
    programs = meta.num_decode_rows * triton.cdiv(num_heads, tile_m)
    splits = num_splits(programs, meta.max_kv_len, _num_cores(q.device))
    _launch(q, cache, meta, scale, out, _Tiling(tile_m, 1, splits, meta.decode_rows))


@kernel(
    "attention.mla",
    name="triton_invariant",
    needs=cuda(8),
    dtypes=_FLOATS,
    traits={
        "latent_dim": _latent_fits,
        "key_dim": _key_fits,
        "block_size": _power_of_two,
        "kv_dtype": (*_FLOATS, _FP8),
    },
    band=Band.PORTABLE,
    priority=-1,
    batch_invariant=True,
)
def invariant_attention(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, latent_dim: int
) -> torch.Tensor:
    """All rows in tiles of one size: each query meets the keys in the same tiles and order whatever else is in its own,
    and a tile that it does not see changes no bit."""
    out = _checked(q, cache, meta, latent_dim)
    for rows in (meta.decode_rows, meta.prefill_rows):
        if rows.num_rows:
            _launch(q, cache, meta, scale, out, _square(q, rows), invariant=True)
    return out


def _square(q: torch.Tensor, rows: RowRange) -> _Tiling:
    """Of several queries, and of as many heads as fill the tile with them."""
    most = 64 if q.element_size() == 2 else 16
    heads = min(triton.next_power_of_2(q.shape[1]), 16)
    return _Tiling(heads, most // heads, 1, rows)


def _checked(q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, latent_dim: int) -> torch.Tensor:
    """Memory for the result. ValueError for what the kernel cannot read."""
    if q.dim() != 3 or cache.dim() != 3 or q.shape[2] != cache.shape[2] or cache.dtype not in (q.dtype, _FP8):
        raise ValueError(
            f"q [T, Hq, W] and a cache [blocks, size, W] of its dtype or fp8 expected, got {q.shape}, {q.dtype}"
        )
    if q.stride(2) != 1 or not cache.is_contiguous() or meta.block_tables.stride(1) != 1:
        raise ValueError("heads of q and rows of block_tables must have adjacent elements, the cache be contiguous")
    return torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)


class _Tiling(NamedTuple):
    """heads x queries: rows of a tile, at least 16. rows: of the step, that are run."""

    heads: int
    queries: int
    splits: int
    rows: RowRange


def _launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    tiling: _Tiling,
    invariant: bool = False,
) -> None:
    num_heads, latent, splits = q.shape[1], out.shape[2], tiling.splits
    partial = stats = out
    if splits > 1:
        shape = (tiling.rows.num_rows, num_heads, splits)
        partial = torch.empty(*shape, latent, dtype=torch.float32, device=q.device)
        stats = torch.empty(shape, dtype=torch.float32, device=q.device)
    key, half, fp8 = q.shape[2] - latent, q.element_size() == 2, cache.dtype == _FP8
    grid = (
        triton.cdiv(tiling.rows.max_query_len, tiling.queries),
        triton.cdiv(num_heads, tiling.heads),
        tiling.rows.num_rows * splits,
    )
    latent_kernel[grid](
        q, cache.view(torch.uint8) if fp8 else cache, meta.block_tables, meta.query_start, meta.kv_lens,
        out, partial, stats, scale * _LOG2E,
        q.stride(0), q.stride(1), meta.block_tables.stride(0), num_heads, tiling.rows.first,
        HEADS=tiling.heads, QUERIES=tiling.queries, BLOCK_SIZE=cache.shape[1], LATENT=latent, KEY=key,
        TILE_L=triton.next_power_of_2(latent), TILE_K=triton.next_power_of_2(key), TILE_N=32 if half else 16,
        NUM_SPLITS=splits, PRECISION=precision_of(q), FP8=fp8, ONE_LOOP=invariant,
        num_warps=8 if tiling.heads * tiling.queries > 16 else 4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(tiling.rows.num_rows * num_heads,)](
            partial, stats, out, HEAD_DIM=latent, TILE_D=triton.next_power_of_2(latent), NUM_SPLITS=splits, num_warps=8
        )
