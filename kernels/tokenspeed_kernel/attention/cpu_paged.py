# SPDX-License-Identifier: MIT
"""Paged causal attention on the CPU; the work is in csrc/cpu/attention.h and attention_plan.cc.

A query's result has the same bits whatever shares its step, however its prompt was cut into chunks, and for any
number of threads.
"""

from __future__ import annotations

from typing import cast

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.kvcache.cpu_cache import KV_DTYPES, cache_shape, scale_addresses
from tokenspeed_kernel.registry import Band, cpu, kernel


def _a_multiple_of_16(head_dim: int) -> bool:
    return head_dim % 16 == 0


def row_arguments(meta: AttentionMetadata) -> tuple[int, int, int, int, int, int]:
    """Addresses and sizes of the metadata's tensors for the kernel. ValueError when they disagree.

    All layers of a step ask for the same metadata, so the answer is kept on it.
    """
    known = meta.__dict__.get("_cpu_rows")
    if known is not None:
        return cast("tuple[int, int, int, int, int, int]", known)
    num_rows = meta.kv_lens.shape[0]
    tables = meta.block_tables
    if tables.shape[0] != num_rows or meta.query_start.shape[0] != num_rows + 1:
        raise ValueError(
            f"metadata disagrees on the number of rows: block_tables {tuple(tables.shape)}, "
            f"query_start {tuple(meta.query_start.shape)}, kv_lens {tuple(meta.kv_lens.shape)}"
        )
    for name, tensor in (("query_start", meta.query_start), ("kv_lens", meta.kv_lens)):
        if tensor.dtype is not torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32, got {tensor.dtype}")
    if tables.dtype is not torch.int32 or tables.stride(1) != 1:
        raise ValueError(f"block_tables must be int32 with adjacent columns, got {tables.dtype}")
    rows = (
        tables.data_ptr(),
        tables.stride(0),
        tables.shape[1],
        meta.query_start.data_ptr(),
        meta.kv_lens.data_ptr(),
        num_rows,
    )
    meta.__dict__["_cpu_rows"] = rows
    return rows


@kernel(
    "attention.paged",
    name="cpu",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits={"head_dim": _a_multiple_of_16, "kv_dtype": KV_DTYPES},
    band=Band.NATIVE,
    batch_invariant=True,
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
    """Online softmax over tiles of keys at absolute positions. ValueError for what does not fit together."""
    num_tokens, num_heads, head_dim = q.shape
    shape = cache_shape(k_cache, v_cache)
    if head_dim != shape.head_dim or num_heads % shape.num_kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit a cache {tuple(k_cache.shape)}")
    stride = q.stride()
    if stride[1:] != (head_dim, 1):
        raise ValueError("the elements of a token of q must be adjacent")
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float32)
    _cpu.attention(
        q.data_ptr(),
        stride[0],
        num_tokens,
        num_heads,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        scale_addresses(k_cache, scales),
        shape,
        *row_arguments(meta),
        scale,
        window,
        softcap,
        0 if sinks is None else _sinks_address(sinks, num_heads),
        out.data_ptr(),
    )
    return out


def _sinks_address(sinks: torch.Tensor, num_heads: int) -> int:
    if sinks.shape != (num_heads,) or sinks.dtype is not torch.float32 or not sinks.is_contiguous():
        raise ValueError(f"sinks must be contiguous float32 [{num_heads}], got {sinks.dtype} {list(sinks.shape)}")
    return sinks.data_ptr()
