# SPDX-License-Identifier: MIT
"""Paged attention on Hopper by our CUDA kernels: csrc/cuda/decode_attention.cu and prefill_attention.cu.

A step has one launch for its rows of one query and one for the others, and at its first layer a launch each that plans
them (`cuda_plan`). Rows of one query whose block tables begin with the same blocks read these once together. A row's
keys are cut into parts as the batch leaves cores for it, so a row's sums depend on the batch in their order. Parts meet
in scratch memory, and the counters that say who came last are shared by all calls, so calls on one device must follow
each other on one stream.
"""

from __future__ import annotations

import ctypes

import torch

from tokenspeed_kernel.attention import cuda_plan
from tokenspeed_kernel.attention.cuda_plan import DecodeCut, DecodePlan, PrefillCut, PrefillPlan, addresses
from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.cuda_driver import CudaModule, fatbin_for, swizzled_cache, swizzled_heads
from tokenspeed_kernel.registry import Band, Platform, cuda, kernel

_LOG2E = 1.4426950408889634
_HEAD_DIM = 128
_MAX_GROUP = 8
_PREFILL_THREADS = 384
_PREFILL_SHARED_BYTES = 199_680  # six tiles of 32 KB, barriers and jobs, and room to begin at a multiple of 1,024
_DECODE_THREADS = 128
_DECODE_BLOCKS_PER_CORE = 4
_DECODE_SHARED_PERCENT = 40
"""What four blocks take. Keys and values come through the rest, the first-level cache, which streamed products leave
small."""
_FEW_ROWS = 3
"""Rows that are not planned: planning would take longer than it saves."""
_MIN_PART = 64
_MOST_PARTS = 32
LEAST_SAVED = 800_000
"""Keys, of all KV heads, that a group of decode rows must save. Measured with 8 KV heads: 32 rows of 4,096 shared
tokens take 0.83 of the time that they take apart, 64 rows of 1,024 tokens 1.25, 8 rows of 4,096 tokens 2.0."""
_GROUP_QUERIES = 64
_GROUP_KEYS = 16
_QUERIES = 128
_FATBINS = ("decode_plan", "decode_attention", "prefill_plan", "prefill_attention")

_DECODE = CudaModule("decode_attention", shared_percent=_DECODE_SHARED_PERCENT)
_PREFILL = CudaModule("prefill_attention", _PREFILL_SHARED_BYTES)


class _DecodeShape(ctypes.Structure):
    """DecodeShape of decode_own.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("num_heads", "num_kv_heads", "block_size", "num_rows")),
        ("scale", ctypes.c_float),
        ("q_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
    )


class _PrefillShape(ctypes.Structure):
    """PrefillShape of prefill_attention.cu."""

    _fields_ = (
        *((n, ctypes.c_int) for n in ("num_heads", "group", "num_kv_heads", "block_size", "tokens_per_tile")),
        ("scale", ctypes.c_float),
        ("table_stride", ctypes.c_int64),
    )


def _all_built(platform: Platform) -> str | None:
    return next((reason for name in _FATBINS if (reason := fatbin_for(name)(platform))), None)


def _one_tile(group_size: int) -> bool:
    return 1 <= group_size <= _MAX_GROUP


def _sixteens(block_size: int) -> bool:
    return block_size >= 16 and block_size & (block_size - 1) == 0


@kernel(
    "attention.paged",
    name="cuda_bf16",
    needs=cuda(9, only_major=True, also=_all_built),
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
    """At most two launches, and at a step's first layer two more; their number and sizes depend on the metadata's
    host integers only."""
    _check(q, k_cache, v_cache, meta)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _, num_kv_heads, block_size, _ = k_cache.shape
    group, cores = q.shape[1] // num_kv_heads, cuda_plan.num_cores(q.device)
    caches = (k_cache, v_cache)
    slots = max(1, _DECODE_BLOCKS_PER_CORE * cores // num_kv_heads)
    if 0 < meta.num_decode_rows <= _FEW_ROWS:
        _decode_few(q, caches, meta, scale, out, num_parts(meta.num_decode_rows, slots, meta.max_kv_len))
    elif meta.num_decode_rows:
        cut = DecodeCut(block_size, slots, _GROUP_QUERIES // group, least_saved(num_kv_heads))
        for plan in cuda_plan.decode_plans(meta, cut):
            _decode(q, caches, meta, plan, scale, out)
    if meta.num_decode_rows < meta.kv_lens.shape[0]:
        jobs = PrefillCut(_QUERIES // group, num_kv_heads, cores)
        for planned in cuda_plan.prefill_plans(meta, jobs, q.shape[0]):
            _prefill(q, caches, meta, planned, scale, out)
    return out


def num_parts(num_rows: int, slots: int, max_kv_len: int) -> int:
    """Parts of each of a few rows' keys, where `slots` parts run at once and rows are at most so long."""
    return max(1, min(slots // num_rows, -(-max_kv_len // _MIN_PART), _MOST_PARTS))


def least_saved(num_kv_heads: int) -> int:
    """Tokens that a group of rows must read less than its rows would apart."""
    return -(-LEAST_SAVED // num_kv_heads)


def _decode_few(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    meta: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    parts: int,
) -> None:
    rows, num_kv_heads = meta.num_decode_rows, caches[0].shape[1]
    scratch = _scratch(q, rows * parts)
    tensors = (q, *caches, meta.block_tables, meta.kv_lens, out, *scratch, cuda_plan.counters(q.device))
    arguments = (*addresses(*tensors), _decode_shape(q, caches[0], meta, rows, scale))
    blocks = rows * num_kv_heads * parts
    _DECODE.launch(f"decode_few_bf16_{_variant(q, caches[0])}", q.device, blocks, _DECODE_THREADS, arguments)


def _decode(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    meta: AttentionMetadata,
    plan: DecodePlan,
    scale: float,
    out: torch.Tensor,
) -> None:
    rows = slice(plan.first_row, plan.first_row + plan.num_rows)
    scratch = (*_scratch(q, plan.most_parts), cuda_plan.counters(q.device))
    maps = (swizzled_cache(cache, _GROUP_KEYS) for cache in caches)
    tensors = (q[rows], *caches, meta.block_tables[rows], meta.kv_lens[rows], out[rows], *scratch, plan.memory)
    arguments = (*maps, *addresses(*tensors), _decode_shape(q, caches[0], meta, plan.num_rows, scale))
    blocks = plan.most_items * caches[0].shape[1]
    _DECODE.launch(f"decode_attention_bf16_{_variant(q, caches[0])}", q.device, blocks, _DECODE_THREADS, arguments)


def _decode_shape(
    q: torch.Tensor, k_cache: torch.Tensor, meta: AttentionMetadata, num_rows: int, scale: float
) -> _DecodeShape:
    _, num_kv_heads, block_size, _ = k_cache.shape
    strides = (q.stride(0), meta.block_tables.stride(0))
    return _DecodeShape(q.shape[1], num_kv_heads, block_size, num_rows, scale * _LOG2E, *strides)


def _variant(q: torch.Tensor, k_cache: torch.Tensor) -> int:
    """Heads of a KV head that the kernel has room for."""
    return next(heads for heads in (2, 4, 8) if q.shape[1] // k_cache.shape[1] <= heads)


def _scratch(q: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of parts of rows, and what they are relative to."""
    partial = torch.empty(parts, q.shape[1], _HEAD_DIM, dtype=torch.float32, device=q.device)
    return partial, torch.empty(parts, q.shape[1], 2, dtype=torch.float32, device=q.device)


def _prefill(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    meta: AttentionMetadata,
    plan: PrefillPlan,
    scale: float,
    out: torch.Tensor,
) -> None:
    _, num_kv_heads, block_size, _ = caches[0].shape
    num_heads, group = q.shape[1], q.shape[1] // num_kv_heads
    tokens = _QUERIES // group
    shape = _PrefillShape(
        num_heads, group, num_kv_heads, block_size, tokens, scale * _LOG2E, meta.block_tables.stride(0)
    )
    maps = (swizzled_cache(cache, min(block_size, _QUERIES)) for cache in caches)
    partial = torch.empty(plan.most_pieces, _QUERIES, _HEAD_DIM, dtype=torch.float32, device=q.device)
    stats = torch.empty(plan.most_pieces, _QUERIES, 2, dtype=torch.float32, device=q.device)
    scratch = (cuda_plan.counters(q.device), cuda_plan.queue(q.device))
    tensors = (plan.memory, meta.block_tables, meta.query_start, meta.kv_lens, out, partial, stats, *scratch)
    arguments = (swizzled_heads(q, group, tokens), *maps, *addresses(*tensors), shape)
    blocks = cuda_plan.num_cores(q.device)
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
