# SPDX-License-Identifier: MIT
"""Every head belongs to the ranks that need it, and what cannot be split is refused by the flag's name."""

from __future__ import annotations

import pytest

from tokenspeed.config.heads import Share, fair_share, head_shares
from tokenspeed.config.model_error import ModelError


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(32, 8, 1), (32, 8, 2), (32, 8, 8), (9, 3, 2), (9, 3, 3), (14, 2, 2), (40, 5, 3)]
)
def test_every_head_has_one_rank_and_lies_with_its_kv_head(heads: int, kv_heads: int, ranks: int) -> None:
    shares = [head_shares(heads, kv_heads, rank, ranks) for rank in range(ranks)]
    queries = [head for share, _ in shares for head in range(share.start, share.start + share.count)]
    assert queries == list(range(heads))
    group = heads // kv_heads
    assert all((q.start, q.count) == (kv.start * group, kv.count * group) for q, kv in shares)
    assert max(kv.count for _, kv in shares) - min(kv.count for _, kv in shares) <= 1


def test_ranks_beyond_the_kv_heads_share_one() -> None:
    shares = [head_shares(32, 2, rank, 8) for rank in range(8)]
    assert [q.count for q, _ in shares] == [4] * 8
    assert [kv for _, kv in shares] == [Share(0, 1)] * 4 + [Share(1, 1)] * 4


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(9, 3, 4), (32, 6, 8), (9, 3, 6)])
def test_heads_that_do_not_divide_are_refused_by_the_flags_name(heads: int, kv_heads: int, ranks: int) -> None:
    with pytest.raises(ModelError, match=f"--tensor-parallel-size: {heads} heads .* among {ranks} ranks"):
        head_shares(heads, kv_heads, 0, ranks)


@pytest.mark.parametrize(("size", "ranks"), [(10, 2), (10, 3), (7, 4), (3, 3)])
def test_fair_shares_cover_everything_once_and_differ_by_one_at_most(size: int, ranks: int) -> None:
    shares = [fair_share(size, rank, ranks) for rank in range(ranks)]
    assert [element for part in shares for element in range(part.start, part.start + part.count)] == [*range(size)]
    assert max(part.count for part in shares) - min(part.count for part in shares) <= 1
