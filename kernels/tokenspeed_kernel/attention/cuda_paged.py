# SPDX-License-Identifier: MIT
"""Paged attention on Hopper by our CUDA kernels: csrc/cuda/decode_attention.cu and prefill_attention.cu.

A step has one launch for its rows of one query and one for the others. Where rows are few, decoding cuts each row's
keys into parts, as many as the cores and the longest possible row ask for; the parts meet in scratch memory and the
counters that say who came last are shared by all calls, so calls on one device must follow each other on one stream.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.cuda_driver import CudaModule, fatbin_for, swizzled_rows
from tokenspeed_kernel.registry import Band, Platform, cuda, kernel

_LOG2E = 1.4426950408889634
_HEAD_DIM = 128
_MAX_GROUP = 8
_QUERIES = 128
_PREFILL_THREADS = 384
_PREFILL_SHARED_BYTES = 165_888  # five tiles of 32 KB, barriers, and room to begin at a multiple of 1,024
_DECODE_THREADS = 128
_DECODE_BLOCKS = 528  # four of a decode's blocks fit on a core
_MIN_PART = 64
_MAX_PARTS = 32  # one to a lane of the warp that adds them up
_MAX_COUNTERS = 1 << 16

# Keys and values come through the first-level cache, which streamed products leave small.
_DECODE = CudaModule("decode_attention", shared_percent=40)
_PREFILL = CudaModule("prefill_attention", _PREFILL_SHARED_BYTES)


class _DecodeShape(ctypes.Structure):
    """DecodeShape of decode_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("num_heads", "num_kv_heads", "block_size", "num_parts")),
        ("scale", ctypes.c_float),
        ("q_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
    )


class _PrefillShape(ctypes.Structure):
    """PrefillShape of prefill_attention.cu."""

    _fields_ = (
        *((n, ctypes.c_int) for n in ("num_heads", "group", "num_kv_heads", "block_size", "num_rows", "first_row")),
        ("q_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def num_parts(num_pairs: int, max_kv_len: int) -> int:
    """Parts of a row's keys, for so many pairs of row and KV head and so long a row: enough blocks for the cores."""
    return max(1, min(_DECODE_BLOCKS // max(num_pairs, 1), -(-max_kv_len // _MIN_PART), _MAX_PARTS))


def _both_built(platform: Platform) -> str | None:
    return fatbin_for("decode_attention")(platform) or fatbin_for("prefill_attention")(platform)


def _one_tile(group_size: int) -> bool:
    return 1 <= group_size <= _MAX_GROUP


def _sixteens(block_size: int) -> bool:
    return block_size >= 16 and block_size & (block_size - 1) == 0


@kernel(
    "attention.paged",
    name="cuda_bf16",
    needs=cuda(9, only_major=True, also=_both_built),
    dtypes={torch.bfloat16},
    traits={
        "head_dim": {_HEAD_DIM},
        "group_size": _one_tile,
        "block_size": _sixteens,
        "windowed": {False},
        "kv_dtype": {torch.bfloat16},
        "softcap": {False},
        "sinks": {False},
    },
    band=Band.NATIVE,
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
    """At most two launches; their number and sizes depend on the metadata's host integers only."""
    _check(q, k_cache, v_cache, meta)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if meta.num_decode_rows:
        _decode(q, k_cache, v_cache, meta, scale, out)
    if meta.num_decode_rows < meta.kv_lens.shape[0]:
        _prefill(q, k_cache, v_cache, meta, scale, out)
    return out


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
) -> None:
    _, num_kv_heads, block_size, _ = k_cache.shape
    num_heads, rows = q.shape[1], meta.num_decode_rows
    parts = num_parts(rows * num_kv_heads, meta.max_kv_len)
    counters = _counters(q.device)
    partial = stats = out
    if parts > 1:
        if rows * num_kv_heads > _MAX_COUNTERS:
            raise ValueError(f"at most {_MAX_COUNTERS} pairs of row and KV head, got {rows * num_kv_heads}")
        partial = torch.empty(rows, num_heads, parts, _HEAD_DIM, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows, num_heads, parts, 2, dtype=torch.float32, device=q.device)
    shape = _DecodeShape(
        num_heads, num_kv_heads, block_size, parts, scale * _LOG2E, q.stride(0), meta.block_tables.stride(0)
    )
    tensors = (q, k_cache, v_cache, meta.block_tables, meta.kv_lens, out, partial, stats, counters)
    arguments = (*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), shape)
    group = num_heads // num_kv_heads
    variant = next(heads for heads in (2, 4, 8) if group <= heads)
    blocks = rows * num_kv_heads * parts
    _DECODE.launch(f"decode_attention_bf16_{variant}", q.device, blocks, _DECODE_THREADS, arguments)


def _prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
) -> None:
    _, num_kv_heads, block_size, _ = k_cache.shape
    num_heads, first = q.shape[1], meta.num_decode_rows
    rows = meta.kv_lens.shape[0] - first
    shape = _PrefillShape(
        num_heads, num_heads // num_kv_heads, num_kv_heads, block_size, rows, first,
        q.stride(0), meta.block_tables.stride(0), scale * _LOG2E,
    )  # fmt: skip
    maps = (swizzled_rows(cache.view(-1, _HEAD_DIM), min(block_size, _QUERIES)) for cache in (k_cache, v_cache))
    tensors = (q, meta.block_tables, meta.query_start, meta.kv_lens, out)
    arguments = (*maps, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), shape)
    blocks = -(-meta.max_query_len // _QUERIES) * num_heads * rows
    _PREFILL.launch("prefill_attention_bf16", q.device, blocks, _PREFILL_THREADS, arguments)


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata) -> None:
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.shape != k_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"q [T, Hq, D] and caches [blocks, Hk, size, D] expected, got {q.shape}, {k_cache.shape}")
    if q.shape[1] % k_cache.shape[1] or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"Hq must be a multiple of Hk, caches contiguous, got {q.shape[1]} and {k_cache.shape[1]}")
    if q.stride()[1:] != (q.shape[2], 1) or q.stride(0) % 8 or q.data_ptr() % 16:
        raise ValueError("heads of a token of q must be adjacent, tokens must begin at multiples of 16 bytes")
    if meta.block_tables.stride(1) != 1:
        raise ValueError("block_tables must have adjacent columns")


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros; every launch leaves them so."""
    return torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)
