# SPDX-License-Identifier: MIT
"""CPU latent attention at every instruction set: right, and the same bits in any batch, chunk and thread count."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.attention.reference_mla import latent_attention as reference
from tokenspeed_kernel.numerics.cpu_isa import at_level, isa_levels, with_threads

LATENT, KEY = 48, 16
NAN = float("nan")


@pytest.fixture(params=isa_levels(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_level(request.param) as level:
        yield level


@dataclasses.dataclass
class Sequence:
    """One request: queries and cached rows of all its positions."""

    q: torch.Tensor
    rows: torch.Tensor


def sequence(length: int, seed: int, heads: int = 6, width: int = LATENT + KEY) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(length, heads, width, generator=generator)
    return Sequence(q, torch.randn(length, width, generator=generator))


def attend(
    rows: list[tuple[Sequence, int, int]], block_size: int = 16, by_reference: bool = False, latent: int = LATENT
) -> list[torch.Tensor]:
    """Each row's queries [begin, end) over keys [0, end); free cache memory is NaN. Returns each row's output."""
    per_row = max(-(-end // block_size) for _, _, end in rows)
    num_blocks = 1 + per_row * len(rows)
    width = rows[0][0].rows.shape[1]
    cache = torch.full((num_blocks, block_size, width), NAN)
    # Blocks of different rows are interleaved and backwards.
    tables = (num_blocks - 1 - torch.arange(per_row * len(rows))).reshape(per_row, len(rows)).T.contiguous().int()
    for table, (item, _, end) in zip(tables, rows, strict=True):
        at = torch.arange(end)
        slots = table[at // block_size].long() * block_size + at % block_size
        api.store_latent(item.rows[:end, :latent], item.rows[:end, latent:], cache, slots)
    lens = [end - begin for _, begin, end in rows]
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()
    ends = torch.tensor([end for _, _, end in rows], dtype=torch.int32)
    meta = api.AttentionMetadata(tables, starts, ends, max(lens), int(ends.max()), 0)
    q = torch.cat([item.q[begin:end] for item, begin, end in rows])
    run = reference if by_reference else api.latent_attention
    return list(run(q, cache, meta, width**-0.5, latent).split(lens))


@pytest.mark.parametrize("heads", [1, 6, 16, 34, 128])
@pytest.mark.parametrize("block_size", [5, 16, 64])
def test_mixed_rows_agree_with_the_reference(heads: int, block_size: int) -> None:
    lengths = [(0, 1), (62, 63), (63, 64), (127, 128), (128, 129), (399, 400), (0, 37), (50, 150)]
    rows = [(sequence(end, end, heads), begin, end) for begin, end in lengths]
    got, want = attend(rows, block_size), attend(rows, block_size, by_reference=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("latent", "key"), [(20, 6), (16, 8), (24, 16)])
def test_sizes_that_are_no_multiple_of_16_agree_with_the_reference_and_keep_their_bits(latent: int, key: int) -> None:
    lengths = [(0, 1), (127, 128), (0, 37), (50, 150)]
    rows = [(sequence(end, end, width=latent + key), begin, end) for begin, end in lengths]
    got, want = attend(rows, latent=latent), attend(rows, by_reference=True, latent=latent)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
    for row, amid in zip(rows, got, strict=True):
        assert torch.equal(attend([row], block_size=5, latent=latent)[0], amid)


def test_decode_gives_the_bits_of_prefill_however_the_prompt_was_cut() -> None:
    item = sequence(300, 1)
    (whole,) = attend([(item, 0, 300)])
    for cuts in ([1, 2, 64, 65, 300], [128, 129, 299, 300], [17, 130, 257, 300]):
        begin = 0
        for end in cuts:
            (part,) = attend([(item, begin, end)])
            assert torch.equal(part, whole[begin:end]), (begin, end)
            begin = end


def test_row_has_the_same_bits_alone_and_beside_others() -> None:
    others = [(sequence(150, 2), 149, 150), (sequence(70, 3), 0, 70)]
    mine = (sequence(290, 4), 280, 290)
    (alone,) = attend([mine])
    for at in range(3):
        rows = [*others[:at], mine, *others[at:]]
        assert torch.equal(attend(rows)[at], alone)


def test_a_head_has_the_same_bits_whatever_other_heads_there_are() -> None:
    item = sequence(200, 5, heads=6)
    (six,) = attend([(item, 190, 200)])
    for heads in (1, 5):
        (fewer,) = attend([(Sequence(item.q[:, :heads], item.rows), 190, 200)])
        assert torch.equal(fewer, six[:, :heads])


def test_number_of_threads_and_block_size_change_no_bit() -> None:
    rows = [(sequence(600, 5, 32), 599, 600), (sequence(100, 6, 32), 20, 100)]
    with with_threads(1):
        want = attend(rows)
    for threads in (2, 4):
        with with_threads(threads):
            assert all(torch.equal(a, b) for a, b in zip(attend(rows, block_size=7), want, strict=True))


@pytest.mark.parametrize("rows", [32, 10])
def test_heads_product_has_the_bits_of_each_head_alone_and_of_each_token_alone(rows: int) -> None:
    x, weight = torch.randn(9, 6, 40), torch.randn(6 * rows, 40)
    out = torch.full((9, 6, rows), NAN)
    api.linear_heads(x, api.prepare_weight(weight, "cpu"), out)
    for head in range(6):
        alone = api.linear(x[:, head], api.prepare_weight(weight[head * rows : head * rows + rows], "cpu"))
        assert torch.equal(out[:, head], alone)
    one = torch.empty(1, 6, rows)
    api.linear_heads(x[4:5], api.prepare_weight(weight, "cpu"), one)
    assert torch.equal(one[0], out[4])


def call(**changes: torch.Tensor) -> torch.Tensor:
    """One decode row of length 3 with parts of the call replaced."""
    parts = {
        "q": torch.zeros(1, 2, LATENT + KEY),
        "cache": torch.zeros(4, 16, LATENT + KEY),
        "block_tables": torch.tensor([[1, 2]], dtype=torch.int32),
        "kv_lens": torch.tensor([3], dtype=torch.int32),
    } | changes
    starts = torch.tensor([0, 1], dtype=torch.int32)
    meta = api.AttentionMetadata(parts["block_tables"], starts, parts["kv_lens"], 1, 3, 1)
    return api.latent_attention(parts["q"], parts["cache"], meta, 1.0, LATENT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": torch.tensor([[4, 0]], dtype=torch.int32)}, r"block_tables row\[0\] is 4"),
        ({"kv_lens": torch.tensor([33], dtype=torch.int32)}, "kv_lens of row 0 is 33"),
        ({"q": torch.zeros(1, 2, LATENT)}, "do not fit a cache"),
        ({"q": torch.zeros(1, LATENT + KEY, 2).transpose(1, 2)}, "must be adjacent"),
        ({"cache": torch.zeros(4, LATENT + KEY, 16).transpose(1, 2)}, "contiguous blocks"),
    ],
)
def test_call_that_would_read_elsewhere_is_refused_by_name(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_latent_is_not_written_outside_the_cache() -> None:
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 64"):
        api.store_latent(
            torch.zeros(1, LATENT), torch.zeros(1, KEY), torch.zeros(4, 16, LATENT + KEY), torch.tensor([64])
        )
