# SPDX-License-Identifier: MIT
"""Multi-head latent attention on Hopper by our CUDA kernels, for DeepSeek's 512 + 64 numbers a token.

A launch for the rows of one query and one for the others, planned once a step as those of `cuda_paged`, with whom it
shares counters; calls on one device must follow each other on one stream. A row's sums depend on the batch in their
order. Rows of one query have a kernel of their own up to sixteen heads (latent_decode.cu), where reading the cache is
what takes time; more heads and prompts fill tiles of 64 queries (latent_attention.cu).
"""

from __future__ import annotations

import ctypes

import torch

from tokenspeed_kernel.attention import cuda_plan
from tokenspeed_kernel.attention.cuda_plan import DecodeCut, PrefillCut, addresses
from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.cuda_driver import (
    CudaModule,
    fatbin_for,
    swizzled_cache,
    swizzled_cache_panels,
    swizzled_heads,
    swizzled_panels,
)
from tokenspeed_kernel.registry import Band, Platform, cuda, kernel

_LOG2E = 1.4426950408889634
_LATENT, _KEY = 512, 64
_QUERIES = 64
_KEY_TILE = 64
_THREADS = 384  # of either
_SHARED_BYTES = 232_448  # three tiles of 72 KB, weights on their way, and room to begin at a multiple of 1,024
_FEW_HEADS = 16
_CHUNK_KEYS = 16
_FEW_SHARED_BYTES = 226_304  # twelve chunks of 18 KB, weights, and room as above
# What adding up a part costs by what multiplying a tile does, a head: see DecodeCut.
_SHARE_PER_HEAD, _FEW_SHARE = 0.01, 0.4
FATBINS = ("decode_plan", "prefill_plan", "latent_plan", "latent_attention", "latent_decode")

_KERNELS = CudaModule("latent_attention", _SHARED_BYTES)
_FEW = CudaModule("latent_decode", _FEW_SHARED_BYTES)


class _LatentShape(ctypes.Structure):
    """LatentShape of latent_attention.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in ("num_heads", "heads_per_tile", "tokens_per_tile", "block_size", "num_rows")
        ),
        ("scale", ctypes.c_float),
        ("table_stride", ctypes.c_int64),
    )


class _FewShape(ctypes.Structure):
    """FewShape of latent_decode.cu."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("num_heads", "block_size")),
        ("scale", ctypes.c_float),
        ("table_stride", ctypes.c_int64),
    )


def _all_built(platform: Platform) -> str | None:
    return next((reason for name in FATBINS if (reason := fatbin_for(name)(platform))), None)


def _sixteens(block_size: int) -> bool:
    return block_size >= 16 and block_size & (block_size - 1) == 0


@kernel(
    "attention.mla",
    name="cuda_bf16",
    needs=cuda(9, only_major=True, also=_all_built),
    dtypes={torch.bfloat16},
    traits={"latent_dim": {_LATENT}, "key_dim": {_KEY}, "block_size": _sixteens, "kv_dtype": {torch.bfloat16}},
    band=Band.NATIVE,
)
def latent_attention(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, latent_dim: int
) -> torch.Tensor:
    """At most three launches, and at a step's first layer two more; their number and sizes depend on the metadata's
    host integers only."""
    if q.dim() != 3 or cache.dim() != 3 or q.shape[2] != cache.shape[2] or q.shape[2] != _LATENT + _KEY:
        raise ValueError(f"q [T, Hq, 576] and a cache [blocks, size, 576] expected, got {q.shape}, {cache.shape}")
    if q.stride(2) != 1 or not cache.is_contiguous() or meta.block_tables.stride(1) != 1:
        raise ValueError("heads of q and rows of block_tables must have adjacent elements, the cache be contiguous")
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        q = q.contiguous()
    tokens, num_heads, _ = q.shape
    out = torch.empty(tokens, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    heads = min(num_heads, _QUERIES)
    head_tiles, cores = -(-num_heads // heads), cuda_plan.num_cores(q.device)
    if meta.num_decode_rows and num_heads <= _FEW_HEADS:
        _decode_few(q, cache, meta, scale, out, cores)
    elif meta.num_decode_rows:
        slots, least = max(1, cores // head_tiles), _SHARE_PER_HEAD * heads
        _decode(q, cache, meta, scale, out, DecodeCut(cache.shape[1], slots, least_share=least))
    if meta.num_decode_rows < meta.kv_lens.shape[0]:
        _prefill(q, cache, meta, scale, out, PrefillCut(_QUERIES // heads, head_tiles, 0))
    return out


def _decode(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, out: torch.Tensor, cut: DecodeCut
) -> None:
    num_heads, heads = q.shape[1], min(q.shape[1], _QUERIES)
    for plan in cuda_plan.decode_plans(meta, cut):
        rows = slice(plan.first_row, plan.first_row + plan.num_rows)
        tables, kv_lens = meta.block_tables[rows], meta.kv_lens[rows]
        partial = torch.empty(plan.most_parts, num_heads, _LATENT, dtype=torch.float32, device=q.device)
        stats = torch.empty(plan.most_parts, num_heads, 2, dtype=torch.float32, device=q.device)
        shape = _LatentShape(
            num_heads, heads, 1, cache.shape[1], plan.num_rows, scale * _LOG2E, meta.block_tables.stride(0)
        )
        tensors = (plan.memory, tables, meta.query_start, kv_lens, out[rows], partial, stats)
        maps = (swizzled_heads(q[rows], heads, 1), _latents(cache))
        arguments = (*maps, *addresses(*tensors, cuda_plan.counters(q.device)), shape)
        blocks = plan.most_items * -(-num_heads // heads)
        _KERNELS.launch("latent_decode_bf16", q.device, blocks, _THREADS, arguments)


def _decode_few(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, out: torch.Tensor, blocks: int
) -> None:
    num_heads, plan = q.shape[1], cuda_plan.latent_plan(meta, blocks, _FEW_SHARE)
    partial = torch.empty(2 * blocks, num_heads, _LATENT, dtype=torch.float32, device=q.device)
    stats = torch.empty(2 * blocks, num_heads, 2, dtype=torch.float32, device=q.device)
    shape = _FewShape(num_heads, cache.shape[1], scale * _LOG2E, meta.block_tables.stride(0))
    maps = (swizzled_panels(q, num_heads, 1), swizzled_cache_panels(cache, _CHUNK_KEYS))
    tensors = (plan, meta.block_tables, meta.kv_lens, out, partial, stats, cuda_plan.counters(q.device))
    _FEW.launch("latent_decode_few_bf16", q.device, blocks, _THREADS, (*maps, *addresses(*tensors), shape))


def _prefill(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, out: torch.Tensor, cut: PrefillCut
) -> None:
    num_heads, heads, tokens = q.shape[1], min(q.shape[1], _QUERIES), cut.tokens_per_tile
    for plan in cuda_plan.prefill_plans(meta, cut, q.shape[0]):
        shape = _LatentShape(num_heads, heads, tokens, cache.shape[1], 0, scale * _LOG2E, meta.block_tables.stride(0))
        tensors = (plan.memory, meta.block_tables, meta.query_start, meta.kv_lens, out, out, out)
        maps = (swizzled_heads(q, heads, tokens), _latents(cache))
        arguments = (*maps, *addresses(*tensors, cuda_plan.counters(q.device)), shape)
        blocks = plan.most_jobs * cut.num_jobs
        _KERNELS.launch("latent_prefill_bf16", q.device, blocks, _THREADS, arguments)


def _latents(cache: torch.Tensor) -> object:
    return swizzled_cache(cache, min(cache.shape[1], _KEY_TILE))
