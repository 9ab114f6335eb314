# SPDX-License-Identifier: MIT
"""Attention of one layer over the paged cache, between the fused qkv projection and the output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.parallel import Placement
from tokenspeed_kernel import api
from tokenspeed_kernel.api import HeadNorms, Heads, Slots


@dataclass(frozen=True)
class AttentionShape:
    """Heads of this rank. scale: factor on q . k. window: positions that a query sees, its own included; 0 for all.
    softcap: c, where scores x are c tanh(x / c); 0 for none.
    k_scale, v_scale: what keys and values are divided by before they are stored."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    k_scale: float
    v_scale: float


class PagedAttention:
    """Rotates q and k, stores k and v in the layer's cache, attends. Heads are split among the ranks."""

    takes = Placement.SHARDED
    gives = Placement.SHARDED

    def __init__(
        self,
        layer: int,
        shape: AttentionShape,
        cos_sin: torch.Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """norms: of each head's query and key, or None. sinks: a logit of each head of this rank, or None."""
        self._layer = layer
        self._head_dim = shape.head_dim
        self._heads = shape.num_heads + 2 * shape.num_kv_heads
        self._splits = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self._width = shape.num_heads * shape.head_dim
        self._window = shape.window
        self._softcap = shape.softcap
        divisors = (shape.k_scale, shape.v_scale)
        self._divisors = None if divisors == (1.0, 1.0) else divisors
        self._scale = shape.scale * shape.k_scale
        self._cos_sin = cos_sin
        self._norms = None
        if norms is not None:
            q_norm, k_norm = norms
            self._norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)
        self._sinks = None if sinks is None else sinks.float()

    def __call__(self, qkv: torch.Tensor, batch: ForwardBatch, /) -> torch.Tensor:
        """[T, (Hq + 2 Hk) * D] to [T, Hq * D]; qkv is overwritten."""
        q, k, v = torch.split_with_sizes(qkv.view(-1, self._heads, self._head_dim), self._splits, 1)
        k_cache, v_cache, *rest = batch.kv_caches[self._layer]
        kv_scales = (rest[0], rest[1]) if rest else None
        slots = Slots(k_cache, v_cache, batch.slot_mapping, kv_scales, self._divisors)
        q = api.norm_rope_store(Heads(q, k, v), self._norms, batch.positions, self._cos_sin, slots)
        out = batch.attend(q, self._attention)
        if self._divisors is not None:
            out *= self._divisors[1]
        return out.view(-1, self._width)

    def _attention(self, q: torch.Tensor, step: ForwardBatch) -> torch.Tensor:
        k_cache, v_cache, *rest = step.kv_caches[self._layer]
        scales = (rest[0], rest[1]) if rest else None
        return api.attention(
            q,
            k_cache,
            v_cache,
            step.attention,
            self._scale,
            self._window,
            softcap=self._softcap,
            sinks=self._sinks,
            scales=scales,
        )
