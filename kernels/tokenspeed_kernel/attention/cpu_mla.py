# SPDX-License-Identifier: MIT
"""Multi-head latent attention on the CPU: the paged kernel of csrc/cpu/attention.h with one KV head for all queries.

Groups of query heads share a tile of transposed keys; a value is the first part of its key. As there, a query's
result has the same bits whatever shares its step, however its prompt was cut, and for any number of threads.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.attention.cpu_paged import row_arguments
from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.kvcache.cpu_cache import KV_DTYPES, latent_shape
from tokenspeed_kernel.registry import Band, cpu, kernel


def _a_multiple_of_16(dim: int) -> bool:
    return dim % 16 == 0


@kernel(
    "attention.mla",
    name="cpu",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits={"latent_dim": _a_multiple_of_16, "key_dim": _a_multiple_of_16, "kv_dtype": KV_DTYPES},
    band=Band.NATIVE,
    batch_invariant=True,
)
def latent_attention(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, latent_dim: int
) -> torch.Tensor:
    """Online softmax over tiles of keys at absolute positions. ValueError for what does not fit together."""
    num_tokens, num_heads, width = q.shape
    shape = latent_shape(cache)
    if width != shape.head_dim or latent_dim > width:
        raise ValueError(f"q {tuple(q.shape)} and latents of {latent_dim} do not fit a cache {tuple(cache.shape)}")
    if q.stride(1) != width or q.stride(2) != 1:
        raise ValueError("the elements of a token of q must be adjacent")
    out = torch.empty((num_tokens, num_heads, latent_dim), dtype=torch.float32)
    _cpu.latent_attention(
        q.data_ptr(),
        q.stride(0),
        num_tokens,
        num_heads,
        cache.data_ptr(),
        shape,
        *row_arguments(meta),
        scale,
        latent_dim,
        out.data_ptr(),
    )
    return out
