# SPDX-License-Identifier: MIT
"""CPU paged attention at every instruction set: right, and the same bits in any batch, chunk and thread count."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.attention.reference import paged_attention as reference
from tokenspeed_kernel.numerics.cpu_isa import at_level, isa_levels, with_threads

KV_HEADS, HEAD_DIM = 2, 32
NAN = float("nan")


# Dtype of the cache, and whether each head of each token has a scale.
CACHES = [(torch.float32, False), (torch.bfloat16, False), (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True)]


@pytest.fixture(params=isa_levels(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_level(request.param) as level:
        yield level


@dataclasses.dataclass
class Sequence:
    """One request: queries, keys and values of all its positions."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def sequence(length: int, seed: int, group: int = 3, head_dim: int = HEAD_DIM) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    heads = KV_HEADS * group
    return Sequence(*(torch.randn(length, n, head_dim, generator=generator) for n in (heads, KV_HEADS, KV_HEADS)))


def attend(
    rows: list[tuple[Sequence, int, int]],
    block_size: int = 16,
    window: int = 0,
    cache: tuple[torch.dtype, bool] = CACHES[0],
    by_reference: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Each row's queries [begin, end) over keys [0, end); free cache memory is NaN. Returns each row's output."""
    head_dim = rows[0][0].q.shape[2]
    per_row = max(-(-end // block_size) for _, _, end in rows)
    num_blocks = 1 + per_row * len(rows)
    shape = (num_blocks, KV_HEADS, block_size, head_dim)
    k_cache, v_cache = (torch.full(shape, NAN).to(cache[0]) for _ in range(2))
    scales = (torch.full(shape[:3], NAN), torch.full(shape[:3], NAN)) if cache[1] else None
    # Blocks of different rows are interleaved and backwards.
    tables = (num_blocks - 1 - torch.arange(per_row * len(rows))).reshape(per_row, len(rows)).T.contiguous().int()
    for table, (item, _, end) in zip(tables, rows, strict=True):
        at = torch.arange(end)
        slots = table[at // block_size].long() * block_size + at % block_size
        api.store_kv(item.k[:end], item.v[:end], k_cache, v_cache, slots, scales)
    lens = [end - begin for _, begin, end in rows]
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()
    ends = torch.tensor([end for _, _, end in rows], dtype=torch.int32)
    meta = api.AttentionMetadata(tables, starts, ends, max(lens), int(ends.max()), 0)
    q = torch.cat([item.q[begin:end] for item, begin, end in rows])
    run = reference if by_reference else api.attention
    out = run(q, k_cache, v_cache, meta, head_dim**-0.5, window, softcap, sinks, scales)
    return list(out.split(lens))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [0, 1, 40, 200])
@pytest.mark.parametrize(("block_size", "head_dim", "group"), [(16, 64, 3), (5, 80, 1), (64, 16, 4), (16, 20, 2)])
def test_mixed_rows_agree_with_the_reference(
    window: int, block_size: int, head_dim: int, group: int, cache: tuple[torch.dtype, bool]
) -> None:
    lengths = [(0, 1), (62, 63), (63, 64), (127, 128), (128, 129), (399, 400), (0, 37), (50, 200), (290, 300)]
    rows = [(sequence(end, end, group, head_dim), begin, end) for begin, end in lengths]
    got = attend(rows, block_size, window, cache)
    want = attend(rows, block_size, window, cache, by_reference=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("window", [0, 40])
def test_soft_cap_and_sinks_agree_with_the_reference_and_keep_the_bits_of_a_row_alone(window: int) -> None:
    rows = [(sequence(end, end), begin, end) for begin, end in [(0, 1), (127, 128), (399, 400), (50, 200)]]
    sinks = torch.randn(KV_HEADS * 3, generator=torch.Generator().manual_seed(11)) * 4
    sinks[1] = 60.0  # far above every score
    for softcap, some in ((2.0, None), (0.0, sinks), (3.0, sinks)):
        got = attend(rows, window=window, softcap=softcap, sinks=some)
        want = attend(rows, window=window, softcap=softcap, sinks=some, by_reference=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
        for row, amid in zip(rows, got, strict=True):
            assert torch.equal(attend([row], window=window, softcap=softcap, sinks=some)[0], amid)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("window", "head_dim"), [(0, HEAD_DIM), (100, HEAD_DIM), (100, 12)])
def test_decode_gives_the_bits_of_prefill_however_the_prompt_was_cut(
    window: int, head_dim: int, cache: tuple[torch.dtype, bool]
) -> None:
    item = sequence(300, 1, head_dim=head_dim)
    (whole,) = attend([(item, 0, 300)], window=window, cache=cache)
    for cuts in ([1, 2, 64, 65, 300], [128, 129, 299, 300], [17, 130, 257, 300]):
        begin = 0
        for end in cuts:
            (part,) = attend([(item, begin, end)], window=window, cache=cache)
            assert torch.equal(part, whole[begin:end]), (begin, end)
            begin = end


@pytest.mark.parametrize("head_dim", [HEAD_DIM, 12])
def test_row_has_the_same_bits_alone_and_beside_others(head_dim: int) -> None:
    others = [(sequence(150, 2, head_dim=head_dim), 149, 150), (sequence(70, 3, head_dim=head_dim), 0, 70)]
    mine = (sequence(290, 4, head_dim=head_dim), 280, 290)
    (alone,) = attend([mine])
    for at in range(3):
        rows = [*others[:at], mine, *others[at:]]
        assert torch.equal(attend(rows)[at], alone)


def test_number_of_threads_and_block_size_change_no_bit() -> None:
    rows = [(sequence(600, 5), 599, 600), (sequence(100, 6), 20, 100)]
    with with_threads(1):
        want = attend(rows)
    for threads in (2, 4):
        with with_threads(threads):
            assert all(torch.equal(a, b) for a, b in zip(attend(rows, block_size=7), want, strict=True))


def test_row_without_queries_produces_nothing_and_disturbs_nobody() -> None:
    item = sequence(40, 7)
    empty, got = attend([(sequence(9, 8), 9, 9), (item, 30, 40)])
    assert empty.shape[0] == 0
    assert torch.equal(got, attend([(item, 30, 40)])[0])


def test_large_scores_do_not_overflow() -> None:
    item = sequence(80, 9)
    item.q *= 200.0
    (got,) = attend([(item, 0, 80)])
    assert torch.allclose(got, attend([(item, 0, 80)], by_reference=True)[0], atol=1e-3)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, -0x003FFFFF])
def test_a_nan_reaches_every_query_that_sees_it_and_no_other(bits: int) -> None:
    """Whatever its payload and its sign, of a query and of a key."""
    nan, item = torch.tensor(bits, dtype=torch.int32).view(torch.float32), sequence(90, 12)
    item.q[40, 1, 3] = nan
    (got,) = attend([(item, 0, 90)])
    lost = got.isnan().flatten(2).all(2)
    assert lost[40, 1] and lost.sum() == 1 and got.isnan().sum() == HEAD_DIM
    item.q[40, 1, 3], item.k[70, 0, 3] = 0.5, nan
    (got,) = attend([(item, 0, 90)])
    assert got[70:, :3].isnan().all() and not got[:70].isnan().any() and not got[:, 3:].isnan().any()


def test_scaled_cache_is_closer_than_an_unscaled_one_where_values_are_small() -> None:
    item = sequence(100, 10)
    item.v *= 1e-3
    want = attend([(item, 60, 100)])[0]
    off = [(attend([(item, 60, 100)], cache=cache)[0] - want).abs().max() for cache in CACHES[2:]]
    assert off[1] < 0.1 * off[0]


def call(**changes: torch.Tensor) -> torch.Tensor:
    """One decode row of length 3 with parts of the call replaced."""
    cache = torch.zeros(4, KV_HEADS, 16, HEAD_DIM)
    parts = {
        "q": torch.zeros(1, 2, HEAD_DIM),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "block_tables": torch.tensor([[1, 2]], dtype=torch.int32),
        "query_start": torch.tensor([0, 1], dtype=torch.int32),
        "kv_lens": torch.tensor([3], dtype=torch.int32),
    } | changes
    meta = api.AttentionMetadata(parts["block_tables"], parts["query_start"], parts["kv_lens"], 1, 3, 1)
    return api.attention(parts["q"], parts["k_cache"], parts["v_cache"], meta, 1.0, sinks=parts.get("sinks"))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": ints(4, 0)[None]}, r"block_tables row\[0\] is 4, must be in \[0, 4\)"),
        ({"block_tables": ints(-1, 0)[None]}, "block_tables"),
        ({"kv_lens": ints(33)}, "kv_lens of row 0 is 33"),
        ({"kv_lens": ints(0)}, "kv_lens of row 0 is 0"),
        ({"kv_lens": torch.tensor([3])}, "kv_lens must be contiguous int32"),
        ({"query_start": ints(0, 2)}, "query end of row 0 is 2"),
        ({"query_start": ints(0, -1)}, "query end of row 0 is -1"),
        ({"query_start": ints(0)}, "number of rows"),
        ({"q": torch.zeros(1, 3, HEAD_DIM)}, "does not fit a cache"),
        ({"q": torch.zeros(1, HEAD_DIM, 2).transpose(1, 2)}, "must be adjacent"),
        ({"sinks": torch.zeros(3)}, r"sinks must be contiguous float32 \[2\]"),
        ({"v_cache": torch.zeros(3, KV_HEADS, 16, HEAD_DIM)}, "one shape"),
    ],
)
def test_call_that_would_read_elsewhere_is_refused_by_name(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)
