# SPDX-License-Identifier: MIT
"""Multi-head latent attention (DeepSeek-V2, 2024) over a paged latent cache in float32 torch, one row at a time.

The absorbed form: queries are already multiplied by the keys' up-projection, so all heads read the same cached
vector, latent and rotated key, and what comes out still awaits the values' up-projection.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.registry import Band, anywhere, kernel


@kernel(
    "attention.mla",
    name="reference",
    needs=anywhere(),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    band=Band.REFERENCE,
)
def latent_attention(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, latent_dim: int
) -> torch.Tensor:
    """Softmax over the visible positions of every row's own blocks."""
    out = torch.empty(*q.shape[:2], latent_dim, dtype=q.dtype, device=q.device)
    starts = meta.query_start.tolist()
    for row, kv_len in enumerate(meta.kv_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first < last:
            num_blocks = -(-kv_len // cache.shape[1])
            blocks = cache.index_select(0, meta.block_tables[row, :num_blocks].long())
            vectors = blocks.float().flatten(0, 1)[:kv_len]
            out[first:last] = _attend(q[first:last].float(), vectors, scale, latent_dim).to(q.dtype)
    return out


def _attend(q: torch.Tensor, vectors: torch.Tensor, scale: float, latent_dim: int) -> torch.Tensor:
    """Queries [L, Hq, W] are the last L of the positions in vectors [N, W]; returns float32 [L, Hq, latent_dim]."""
    kv_len = vectors.shape[0]
    at = torch.arange(kv_len - q.shape[0], kv_len, device=q.device)[:, None]
    hidden = torch.arange(kv_len, device=q.device)[None, :] > at
    scores = torch.einsum("lhw,nw->hln", q, vectors) * scale
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hln,nw->lhw", weights, vectors[:, :latent_dim])
