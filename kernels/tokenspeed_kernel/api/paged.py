# SPDX-License-Identifier: MIT
"""Operations on the paged KV cache: write, attend, copy and move blocks.

A layer's cache is two tensors [num_blocks, Hk, block_size, D]; for latent attention it is one of
[num_blocks, block_size, W]. The slot of a token is block * block_size + offset.
A cache of float8_e4m3fn may have scales beside it, two tensors float32 [num_blocks, Hk, block_size]: each head of each
token is stored divided by its own, its largest magnitude / 448 (1 for zeros), and read multiplied by it.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.registry import ops, solve
from tokenspeed_kernel.rope.heads import HeadNorms, Heads, Slots

Scales = tuple[torch.Tensor, torch.Tensor]


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: Scales | None = None,
) -> None:
    """Write each token's keys and values to its slot.

    k, v: [T, Hk, D]; tokens may be strided, the elements of a token must be adjacent.
    k_cache, v_cache: [num_blocks, Hk, block_size, D]; values are rounded to the cache's dtype, for float8_e4m3fn after
        a clamp to its range.
    slot_mapping: int64 [T], each in [0, num_blocks * block_size); several padding tokens may share a slot of
        block 0, any of which may win.
    scales: of k_cache and v_cache, written too; None: values are stored as they are.
    """
    _, _, block_size, head_dim = k_cache.shape
    solve(ops.KVCACHE_STORE, k.device.type, k.dtype, head_dim, block_size, k_cache.dtype)(
        k, v, k_cache, v_cache, slot_mapping, scales
    )


def norm_rope_store(
    heads: Heads, norms: HeadNorms | None, positions: torch.Tensor, cos_sin: torch.Tensor, slots: Slots
) -> torch.Tensor:
    """`rms_norm` of every query and key head, `rope`, then `store_kv`: what stands between projection and attention.

    heads: q, k and v of the step, see `Heads`; may be overwritten. norms: None for a model without.
    positions, cos_sin: as `rope` takes them. slots: where keys and values go, see `Slots`. A kernel may read all three
        before the one ahead of it, which made the heads, has ended.

    Returns the queries [T, Hq, D], perhaps in the place of those given.
    """
    q, cache = heads.q, slots.k_cache
    solution = solve(
        ops.ROPE_NORM_STORE, q.device.type, q.dtype,
        q.shape[2], cos_sin.shape[1], norms is not None, cache.shape[2], cache.dtype,
    )  # fmt: skip
    turned: torch.Tensor = solution(heads, norms, positions, cos_sin, slots)
    return turned


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Causal attention of every row's queries over the row's cached keys and values.

    q: [T, Hq, D], Hq a multiple of Hk; tokens may be strided, the elements of a token must be adjacent.
    k_cache, v_cache: [num_blocks, Hk, block_size, D]; query heads [h * G, (h + 1) * G) read KV head h, G = Hq / Hk.
    meta: where the rows lie; see `AttentionMetadata`. This step's keys must already be stored.
    scale: factor on q . k, usually D ** -0.5.
    window: each query sees the last `window` positions, its own included; 0 means all.
    softcap: scores s become softcap * tanh(s / softcap) before the softmax (Gemma 2); 0 leaves them.
    sinks: float32 [Hq] or None; a logit of each head that takes part in the softmax and has no value (gpt-oss).
    scales: of k_cache and v_cache, as `store_kv` wrote them; None: cached values are as they are.

    Returns a contiguous [T, Hq, D] in q's dtype; softmax and sums in float32. Rows with no query produce nothing.
    """
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    group = q.shape[1] // num_kv_heads
    traits = (head_dim, group, block_size, window > 0, k_cache.dtype, softcap > 0, sinks is not None)
    return solve(ops.ATTENTION_PAGED, q.device.type, q.dtype, *traits)(
        q, k_cache, v_cache, meta, scale, window, softcap, sinks, scales
    )


def store_latent(latent: torch.Tensor, key: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write each token's row of latent attention to its slot.

    latent: [T, latent_dim], normalised; key: [T, W - latent_dim], rotated. Elements of a token adjacent.
    cache: [num_blocks, block_size, W]; values are rounded to its dtype, for float8_e4m3fn after a clamp to its range.
    slot_mapping: int64 [T], as for `store_kv`.
    """
    solve(ops.KVCACHE_STORE_LATENT, latent.device.type, latent.dtype, cache.dtype)(latent, key, cache, slot_mapping)


def latent_attention(
    q: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, scale: float, latent_dim: int
) -> torch.Tensor:
    """Causal multi-head latent attention in its absorbed form (DeepSeek-V2, 2024): all heads read one vector a token.

    q: [T, Hq, W]; the first latent_dim elements are the query times the up-projection of the head's keys, the others
        its rotated part. The elements of a token must be adjacent.
    cache: [num_blocks, block_size, W], rows as `store_latent` wrote them; this step's must already be stored.
    meta: where the rows lie; see `AttentionMetadata`.
    scale: factor on q . row.
    latent_dim: how much of a row is its value.

    Returns a contiguous [T, Hq, latent_dim] in q's dtype, to be multiplied by the up-projection of the head's values;
    softmax and sums in float32. Rows with no query produce nothing.
    """
    _, block_size, width = cache.shape
    return solve(ops.ATTENTION_MLA, q.device.type, q.dtype, latent_dim, width - latent_dim, block_size, cache.dtype)(
        q, cache, meta, scale, latent_dim
    )


def copy_blocks(caches: list[torch.Tensor], pairs: torch.Tensor) -> None:
    """Copy blocks within every cache.

    caches: tensors [num_blocks, ...] on one device.
    pairs: int32 [C, 2], (source, destination) block numbers. Destinations are distinct, and no block is both a
        source and a destination.
    """
    if not pairs.shape[0]:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for cache in caches:
        plain = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
        by_dtype.setdefault(plain.dtype, []).append(plain)
    for dtype, group in by_dtype.items():
        solve(ops.KVCACHE_COPY_BLOCKS, group[0].device.type, dtype)(group, pairs)


def move_blocks(caches: list[torch.Tensor], packed: torch.Tensor, pairs: torch.Tensor, to_packed: bool) -> None:
    """Copy blocks of every cache to, or from, rows that hold a block of all of them, as a host tier keeps them.

    caches: contiguous tensors [num_blocks, ...] on one device, the bytes of a block a multiple of 8 in each.
    packed: uint8 [num_rows, W], W the bytes of a block over all caches, one behind the other in their order. In the
        same memory, or in memory of the host that the device can reach.
    pairs: int32 [C, 2], (block, row), on the caches' device. What is written is distinct.
    to_packed: whether blocks go into rows, or come out of them.
    """
    if not pairs.shape[0]:
        return
    views = [cache.view(cache.shape[0], -1).view(torch.uint8) for cache in caches]
    solve(ops.KVCACHE_MOVE_BLOCKS, views[0].device.type, torch.uint8)(views, packed, pairs, to_packed)
