# SPDX-License-Identifier: MIT
"""Causal attention over paged keys and values in float32 torch, one row at a time."""

from __future__ import annotations

import torch

from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.registry import Band, anywhere, kernel


@kernel(
    "attention.paged",
    name="reference",
    needs=anywhere(),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    band=Band.REFERENCE,
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
    """Softmax over the visible positions of every row's own blocks."""
    out = torch.empty_like(q)
    starts = meta.query_start.tolist()
    for row, kv_len in enumerate(meta.kv_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first < last:
            keys, values = (
                _gather(k_cache, meta.block_tables[row], kv_len),
                _gather(v_cache, meta.block_tables[row], kv_len),
            )
            if scales is not None:
                keys, values = (
                    rows * _gather(scale.unsqueeze(3), meta.block_tables[row], kv_len)
                    for rows, scale in zip((keys, values), scales, strict=True)
                )
            scores = _scores(q[first:last], keys, scale, window, softcap)
            out[first:last] = _mix(scores, values, sinks).to(q.dtype)
    return out


def _gather(cache: torch.Tensor, table: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The row's first kv_len cached vectors in order: float32 [Hk, kv_len, D]."""
    num_blocks = -(-kv_len // cache.shape[2])
    if cache.dtype == torch.float8_e4m3fn:
        blocks = cache.view(torch.uint8)[table[:num_blocks].long()].view(cache.dtype).float()
    else:
        blocks = cache[table[:num_blocks].long()].float()
    return blocks.transpose(0, 1).flatten(1, 2)[:, :kv_len]


def _scores(q: torch.Tensor, keys: torch.Tensor, scale: float, window: int, softcap: float) -> torch.Tensor:
    """float32 [Hq, L, N], -inf where hidden. Queries [L, Hq, D] are the last L of the positions in keys [Hk, N, D]."""
    keys = keys.repeat_interleave(q.shape[1] // keys.shape[0], dim=0)
    kv_len = keys.shape[1]
    at = torch.arange(kv_len - q.shape[0], kv_len, device=q.device)[:, None]
    key_at = torch.arange(kv_len, device=q.device)[None, :]
    hidden = key_at > at
    if window > 0:
        hidden |= key_at <= at - window
    scores = torch.einsum("lhd,hnd->hln", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(hidden, float("-inf"))


def _mix(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """float32 [L, Hq, D]: values [Hk, N, D] by the softmax of the scores, in which sinks take part."""
    values = values.repeat_interleave(scores.shape[0] // values.shape[0], dim=0)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:2], 1)], dim=2)
    weights = scores.softmax(dim=-1)[:, :, : values.shape[1]]
    return torch.einsum("hln,hnd->lhd", weights, values)
