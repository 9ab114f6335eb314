# SPDX-License-Identifier: MIT
"""Random calls of attention over paged caches, see `cases`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.numerics.case import Case, Dtype, normal
from tokenspeed_kernel.numerics.weight_cases import small_caches


def strided_tokens(values: torch.Tensor) -> torch.Tensor:
    """The same [T, heads, D] values as a view whose tokens lie apart, as in a fused projection."""
    tokens, heads, size = values.shape
    wide = torch.full((tokens, heads * size + 8 * size), float("nan"), dtype=values.dtype)
    wide[:, : heads * size] = values.reshape(tokens, heads * size)
    return wide[:, : heads * size].unflatten(1, (heads, size))


def paged_metadata(
    generator: torch.Generator, rows: Iterable[tuple[int, int]], block_size: int
) -> tuple[AttentionMetadata, int]:
    """Metadata for rows of (query_len, kv_len), decodes first, over shuffled blocks; returns it and num_blocks.

    Block 0 stays unused; the columns past a row's length hold a block number that must never be read.
    """
    query_lens, kv_lens = zip(*rows, strict=True)
    counts = [-(-length // block_size) for length in kv_lens]
    num_blocks = 1 + sum(counts)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).int()
    tables = torch.full((len(counts), max(counts)), 2**30, dtype=torch.int32)
    for row, blocks in enumerate(order.split(counts)):
        tables[row, : counts[row]] = blocks
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_decode_rows = next((i for i, length in enumerate(query_lens) if length != 1), len(query_lens))
    meta = AttentionMetadata(
        tables, starts, torch.tensor(kv_lens, dtype=torch.int32), max(query_lens), max(kv_lens), num_decode_rows
    )
    return meta, num_blocks


_ATTENTION_ROWS: dict[str, list[tuple[int, int]]] = {
    "one decode row": [(1, 37)],
    "decode rows of many lengths": [(1, 1), (1, 16), (1, 17), (1, 300)],
    "a whole prompt": [(19, 19)],
    "a chunk after a prefix": [(13, 70)],
    "decodes and chunks mixed": [(1, 33), (1, 5), (18, 50), (1, 40), (3, 3)],
}


def paged(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    """`attention.paged`."""
    for label, rows in _ATTENTION_ROWS.items():
        for heads, kv_heads, head_dim, block_size, window, softcap, sunk in (
            (3, 1, 64, 16, 0, 0.0, False),
            (4, 4, 32, 16, 20, 0.0, False),
            (8, 2, 128, 32, 0, 0.0, False),
            (8, 1, 64, 16, 24, 0.0, True),
            (2, 2, 64, 16, 0, 3.0, False),
            (4, 2, 24, 16, 20, 0.0, True),
        ):
            meta, num_blocks = paged_metadata(generator, rows, block_size)
            tokens = int(meta.query_start[-1])
            q = normal(generator, tokens, heads, head_dim, dtype=dtype, std=2.0)
            caches = [normal(generator, num_blocks, kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2)]
            for cache in caches:
                cache[0] = float("nan")  # the block nobody owns
            traits = {
                "head_dim": head_dim,
                "group_size": heads // kv_heads,
                "block_size": block_size,
                "windowed": window > 0,
                "kv_dtype": dtype,
                "softcap": softcap > 0,
                "sinks": sunk,
            }
            sinks = normal(generator, heads, std=2.0) if sunk else None
            name = f"{label}, {heads}/{kv_heads} heads of {head_dim}, window {window}, cap {softcap}, sinks {sunk}"
            queries = strided_tokens(q) if heads == 3 else q
            args = (meta, head_dim**-0.5, window, softcap, sinks)
            yield Case("attention.paged", name, dtype, (queries, *caches, *args, None), traits=traits)
            for kv_dtype, scales in small_caches(generator, caches[0].shape[:3]):
                small = [cache.clamp(-400, 400).to(kv_dtype) for cache in caches]
                yield Case(
                    "attention.paged",
                    f"{name}, {kv_dtype} {'scaled' if scales else 'cache'}",
                    dtype,
                    (queries, *small, *args, scales),
                    traits=traits | {"kv_dtype": kv_dtype},
                )

    yield from _long_attention(dtype, generator)
    yield from _shared(dtype, generator)


_LONG_ROWS: dict[str, list[tuple[int, int]]] = {
    "long: decode rows": [(1, 1000), (1, 513), (1, 64)],
    "long: prompts": [(150, 150), (200, 391)],
    "long: decodes and chunks mixed": [(1, 257), (300, 300), (129, 700), (1, 130)],
    "long: few queries after many keys": [(1, 4100), (9, 5000)],
}


def _long_attention(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    """Several tiles of queries and keys."""
    for label, rows in _LONG_ROWS.items():
        for heads, kv_heads, block_size in ((8, 1, 16), (2, 2, 256), (6, 2, 64)):
            meta, num_blocks = paged_metadata(generator, rows, block_size)
            yield _plain_attention(generator, dtype, meta, num_blocks, (heads, kv_heads, block_size), label)


def _plain_attention(
    generator: torch.Generator,
    dtype: Dtype,
    meta: AttentionMetadata,
    num_blocks: int,
    shape: tuple[int, int, int],
    label: str,
) -> Case:
    """Heads of 128. shape: heads, KV heads, block size. What lies past a row's end in its last block is NaN."""
    heads, kv_heads, block_size = shape
    q = normal(generator, int(meta.query_start[-1]), heads, 128, dtype=dtype, std=2.0)
    caches = [normal(generator, num_blocks, kv_heads, block_size, 128, dtype=dtype) for _ in range(2)]
    for cache in caches:
        cache[0] = float("nan")
        for table, length in zip(meta.block_tables, meta.kv_lens.tolist(), strict=True):
            cache[table[(length - 1) // block_size], :, (length - 1) % block_size + 1 :] = float("nan")
    traits = {
        "head_dim": 128,
        "group_size": heads // kv_heads,
        "block_size": block_size,
        "windowed": False,
        "kv_dtype": dtype,
        "softcap": False,
        "sinks": False,
    }
    name = f"{label}, {heads}/{kv_heads} heads, blocks of {block_size}"
    args = (q, *caches, meta, 128**-0.5, 0, 0.0, None, None)
    return Case("attention.paged", name, dtype, args, traits=traits)


_COMMON = 1280
_SHARING = (300, 40, 1, 129, 64, 500, 17, 256, 70, 33)
"""Tokens that rows have after the common ones."""


def _shared(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    """Decode rows of which most read the same first blocks, one fewer of them and two none, and a chunk that does:
    enough for the solution that reads such blocks once."""
    if dtype != torch.bfloat16:
        return
    rows = [*((1, length) for length in _SHARING), (1, 700), (1, 1), (40, 77)]
    for heads, kv_heads, block_size in ((32, 8, 16), (24, 8, 64)):
        own, num_blocks = paged_metadata(generator, rows, block_size)
        count = _COMMON // block_size
        common = torch.arange(num_blocks, num_blocks + count, dtype=torch.int32).expand(len(rows), count)
        tables, lengths = torch.cat([common, own.block_tables], dim=1), own.kv_lens + _COMMON
        for row in (10, 11):
            tables[row, : own.block_tables.shape[1]] = own.block_tables[row]
            lengths[row] -= _COMMON
        tables[5, 1:count] = torch.arange(num_blocks + count, num_blocks + 2 * count - 1)
        meta = replace(own, block_tables=tables, kv_lens=lengths, max_kv_len=int(lengths.max()))
        shape = (heads, kv_heads, block_size)
        yield _plain_attention(generator, dtype, meta, num_blocks + 2 * count, shape, "long: shared blocks")


_LATENT_SHAPES: tuple[tuple[int, int, int, int], ...] = (
    (3, 32, 16, 16),
    (16, 64, 32, 32),
    (20, 48, 16, 64),
    (3, 24, 8, 16),
)


def latent(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    """`attention.mla`."""
    for label, rows in _ATTENTION_ROWS.items():
        for shape in _LATENT_SHAPES:
            case = _latent_case(dtype, generator, label, rows, shape)
            yield case
            if shape[0] == 16:
                small = case.args[1].to(torch.float8_e4m3fn)
                args, traits = (case.args[0], small, *case.args[2:]), {**case.traits, "kv_dtype": small.dtype}
                yield replace(case, label=f"{case.label}, fp8 cache", args=args, traits=traits)
    for shape in ((16, 512, 64, 64), (20, 512, 64, 16), (80, 512, 64, 128)):
        rows = [(1, 700), (1, 64), (1, 65), (1, 1), (33, 33), (5, 200)]
        yield _latent_case(dtype, generator, "long: decodes and chunks mixed", rows, shape)
    if dtype != torch.bfloat16:
        return
    # More rows than a GPU has cores, one row that all of them share, heads that fill their tiles or do not.
    many, one, chunk = [(1, 1 + 61 * row % 190) for row in range(150)], [(1, 5000)], [(150, 700)]
    for heads, block_size in ((3, 16), (16, 32), (33, 64)):
        yield _latent_case(dtype, generator, "long: many decodes", many, (heads, 512, 64, block_size))
    for heads, block_size in ((1, 256), (16, 16), (64, 64), (128, 16)):
        yield _latent_case(dtype, generator, "long: one decode", one, (heads, 512, 64, block_size))
    for heads, block_size in ((1, 64), (128, 32)):
        yield _latent_case(dtype, generator, "long: a chunk", chunk, (heads, 512, 64, block_size))


def _latent_case(
    dtype: Dtype,
    generator: torch.Generator,
    label: str,
    rows: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
) -> Case:
    """shape: heads, latent and rotated part, block size. What lies past a row's end in its last block is NaN."""
    heads, latent_dim, key_dim, block_size = shape
    meta, num_blocks = paged_metadata(generator, rows, block_size)
    width = latent_dim + key_dim
    q = normal(generator, int(meta.query_start[-1]), heads, width, dtype=dtype, std=2.0)
    cache = normal(generator, num_blocks, block_size, width, dtype=dtype)
    cache[0] = float("nan")  # the block nobody owns
    for table, length in zip(meta.block_tables, meta.kv_lens.tolist(), strict=True):
        cache[table[(length - 1) // block_size], (length - 1) % block_size + 1 :] = float("nan")
    traits = {"latent_dim": latent_dim, "key_dim": key_dim, "block_size": block_size, "kv_dtype": dtype}
    name = f"{label}, {heads} heads over {latent_dim} + {key_dim}"
    queries = strided_tokens(q) if heads == 3 else q
    return Case("attention.mla", name, dtype, (queries, cache, meta, width**-0.5, latent_dim), traits=traits)
