# SPDX-License-Identifier: MIT
"""Attention on the CPU for sizes that are no multiple of a vector register: the kernels beside, on padded copies.

A step's rows have their blocks copied into caches of their own, zeros behind every vector up to a multiple of 16, which
changes no sum. So results have the same bits whatever shares the step, as the kernels promise; the copies make it slow,
but such sizes are those of models for tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenspeed_kernel.attention.cpu_mla import latent_attention
from tokenspeed_kernel.attention.cpu_paged import paged_attention
from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.kvcache.cpu_cache import KV_DTYPES
from tokenspeed_kernel.registry import Band, cpu, kernel

_UNIT = 16


def _no_multiple_of_16(head_dim: int) -> bool:
    return head_dim % _UNIT != 0


@kernel(
    "attention.paged",
    name="cpu_padded",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits={"head_dim": _no_multiple_of_16, "kv_dtype": KV_DTYPES},
    band=Band.PORTABLE,
    batch_invariant=True,
)
def padded_paged_attention(
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
    """As `paged_attention`, for any size of head."""
    blocks, compact = _compact(meta, k_cache.shape[2])
    if scales is not None:
        scales = (scales[0][blocks], scales[1][blocks])
    out = paged_attention(
        _padded(q),
        _taken(k_cache, blocks, _padded),
        _taken(v_cache, blocks, _padded),
        compact,
        scale,
        window,
        softcap,
        sinks,
        scales,
    )
    return out[..., : q.shape[2]].contiguous()


def _no_register(latent_dim: int, key_dim: int) -> bool:
    return latent_dim % _UNIT != 0 or key_dim % _UNIT != 0


@kernel(
    "attention.mla",
    name="cpu_padded",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits={"kv_dtype": KV_DTYPES},
    fits=(("latent_dim", "key_dim"), _no_register),
    band=Band.PORTABLE,
    batch_invariant=True,
)
def padded_latent_attention(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, latent_dim: int
) -> torch.Tensor:
    """As `latent_attention`, for any sizes."""

    def both_parts(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([_padded(rows[..., :latent_dim]), _padded(rows[..., latent_dim:])], dim=-1)

    blocks, compact = _compact(meta, cache.shape[1])
    latents = latent_dim + -latent_dim % _UNIT
    out = latent_attention(both_parts(q), _taken(cache, blocks, both_parts), compact, scale, latents)
    return out[..., :latent_dim].contiguous()


def _compact(meta: AttentionMetadata, block_size: int) -> tuple[torch.Tensor, AttentionMetadata]:
    """The blocks of all rows, one row after the other, int64 [B]; the metadata for caches that hold just these."""
    counts = -(-meta.kv_lens // block_size)
    columns = torch.arange(meta.block_tables.shape[1], dtype=torch.int32)
    read = columns < counts[:, None]
    tables = torch.zeros_like(meta.block_tables)
    tables[read] = torch.arange(int(read.sum()), dtype=torch.int32)
    own = (meta.query_start, meta.kv_lens, meta.max_query_len, meta.max_kv_len, meta.num_decode_rows)
    return meta.block_tables[read].long(), AttentionMetadata(tables, *own)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Zeros behind the last axis up to a multiple of 16."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % _UNIT))


def _taken(cache: torch.Tensor, blocks: torch.Tensor, pad: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Some blocks of a cache, padded. torch can neither index nor pad fp8, but its bytes."""
    if cache.dtype == torch.float8_e4m3fn:
        return pad(cache.view(torch.uint8)[blocks]).view(cache.dtype)
    return pad(cache[blocks])
