# SPDX-License-Identifier: MIT
"""CPU sampling at every instruction set: the reference's tokens, thresholds at their edges, right frequencies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.numerics.cpu_isa import at_level, isa_levels, with_threads
from tokenspeed_kernel.sampling import reference

VOCAB = 1003
INF = float("inf")


@pytest.fixture(params=isa_levels(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_level(request.param) as level:
        yield level


def options(rows: int, **changes: Any) -> tuple[torch.Tensor, ...]:
    """temperature, top_k, top_p, min_p, seeds, positions of plain sampling with some changed."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "position": 5} | changes
    floats = torch.float32
    dtypes = (floats, torch.int32, floats, floats, torch.int64, torch.int64)
    return tuple(
        torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()
        for value, dtype in zip(values.values(), dtypes, strict=True)
    )


def logits(rows: int, std: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * std


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 4.0},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": VOCAB - 1},
        {"top_k": VOCAB + 5},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    ],
)
def test_tokens_are_those_of_the_reference(changes: dict[str, float]) -> None:
    values, given, want = expected(tuple(changes.items()))
    assert torch.equal(api.sample(values, *given), want)


@functools.cache
def expected(changes: tuple[tuple[str, float], ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Logits from flat to peaked, options, and the reference's tokens; worked out once for all instruction sets."""
    rows = 30
    values = torch.cat([logits(rows // 3, std) for std in (0.1, 3.0, 12.0)])
    given = options(rows, seed=torch.arange(rows) * (2**40 + 3), position=torch.arange(rows) + 2**33, **dict(changes))
    return values, given, reference.sample(values, *given)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    values = torch.zeros(3, VOCAB)
    values[0, [900, 17, 18]] = 5.0
    values[1] = -INF
    values[2, VOCAB - 1] = 1e-30
    assert api.sample(values, *options(3, temperature=0.0)).tolist() == [17, 0, VOCAB - 1]


def test_banned_tokens_are_never_drawn() -> None:
    values = torch.full((200, VOCAB), -INF)
    values[:, [3, 500]] = 0.0
    drawn = api.sample(values, *options(200, seed=torch.arange(200)))
    assert set(drawn.tolist()) == {3, 500}


def test_equal_logits_share_their_fate_at_the_threshold() -> None:
    values = torch.zeros(300, VOCAB)
    values[:, :10] = 4.0
    drawn = api.sample(values, *options(300, top_k=2, seed=torch.arange(300)))
    assert set(drawn.tolist()) == set(range(10))


def test_frequencies_follow_the_probabilities() -> None:
    rows = 4000
    odds = torch.tensor([0.5, 0.3, 0.15, 0.05])
    values = torch.full((rows, VOCAB), -INF)
    values[:, 100:104] = odds.log()
    drawn = api.sample(values, *options(rows, seed=11, position=torch.arange(rows)))
    shares = torch.bincount(drawn.long() - 100, minlength=4) / rows
    assert (shares - odds).abs().max() < 0.03


def test_token_depends_on_neither_the_batch_nor_the_threads() -> None:
    given = options(6, seed=torch.arange(6), top_p=0.8)
    with with_threads(3):
        together = api.sample(logits(6), *given)
    with with_threads(1):
        alone = [api.sample(logits(6)[i : i + 1], *(item[i : i + 1] for item in given)) for i in range(6)]
    assert torch.equal(torch.cat(alone), together)


def test_huge_vocabulary_and_flat_distribution_are_handled() -> None:
    values = torch.zeros(2, 70_001)
    given = options(2, top_p=0.5, top_k=50_000, seed=torch.tensor([1, -1]))
    assert torch.equal(api.sample(values, *given), reference.sample(values, *given))


@pytest.mark.parametrize("top_n", [0, 1, 20, 700, VOCAB])
def test_logprobs_are_those_of_the_reference(top_n: int) -> None:
    values = logits(5, 4.0)
    tokens = torch.tensor([0, VOCAB - 1, 17, 17, 400])
    chosen, top, ids = api.logprobs(values, tokens.int(), top_n)
    want_chosen, want_top, _ = reference.logprobs(values, tokens, top_n)
    assert torch.allclose(chosen, want_chosen, atol=1e-5)
    assert torch.allclose(top, want_top, atol=1e-5)
    # Distinct logits may round to one log-probability; the order of ids is that of the logits.
    assert torch.equal(ids.long(), values.sort(dim=1, descending=True, stable=True).indices[:, :top_n])


def test_logprobs_rank_equal_logits_by_id_and_keep_banned_tokens_last() -> None:
    values = torch.zeros(1, VOCAB)
    values[0, 5] = -INF
    chosen, top, ids = api.logprobs(values, torch.tensor([5]), VOCAB)
    assert chosen.item() == -INF and top[0, -1].item() == -INF
    assert ids[0].tolist() == [i for i in range(VOCAB) if i != 5] + [5]


def test_penalties_are_those_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(3)
    counts = (torch.rand(9, VOCAB, generator=generator) < 0.02).int() * 3
    prompt = torch.rand(9, VOCAB, generator=generator) < 0.02
    slots = torch.tensor([8, 0, 3, 3])
    factors = [torch.rand(4, generator=generator) + 0.5 for _ in range(3)]
    got, want = logits(4), logits(4)
    api.apply_penalties(got, slots, counts, prompt, *factors)
    reference.apply_penalties(want, slots, counts, prompt, *factors)
    assert torch.allclose(got, want, rtol=1e-6)
    assert not torch.equal(got, logits(4))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, VOCAB])
def test_masked_rows_are_those_of_the_reference_and_others_stay(vocab: int) -> None:
    words = -(-vocab // 32)
    mask = torch.randint(-(2**31), 2**31, (2, words), generator=torch.Generator().manual_seed(1)).int()
    rows = torch.tensor([3, 1])
    got, want = logits(4)[:, :vocab].contiguous(), logits(4)[:, :vocab].contiguous()
    api.token_mask(got, mask, rows)
    reference.token_mask(want, mask, rows)
    assert torch.equal(got, want)
    assert torch.equal(got[[0, 2]], logits(4)[[0, 2], :vocab])


def test_mask_for_a_row_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"rows\[0\] is 2, must be in \[0, 2\)"):
        api.token_mask(logits(2), torch.zeros(1, 32, dtype=torch.int32), torch.tensor([2]))


def test_slot_outside_the_tables_is_named() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"slots\[0\] is 2, must be in \[0, 2\)"):
        api.apply_penalties(
            logits(1),
            torch.tensor([2]),
            torch.zeros(2, VOCAB, dtype=torch.int32),
            torch.zeros(2, VOCAB, dtype=torch.bool),
            one,
            one,
            one,
        )


def test_options_of_wrong_length_or_dtype_are_named() -> None:
    given = list(options(2))
    given[1] = given[1].long()
    with pytest.raises(ValueError, match=r"top_k must be contiguous torch\.int32"):
        api.sample(logits(2), *given)
    with pytest.raises(ValueError, match="temperature must be"):
        api.sample(logits(3), *options(2))


def test_token_or_count_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(ValueError, match=r"tokens\[0\] is 1003"):
        api.logprobs(logits(1), torch.tensor([VOCAB]), 1)
    with pytest.raises(ValueError, match="top_n must be in"):
        api.logprobs(logits(1), torch.tensor([0]), VOCAB + 1)


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.0}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.5}], ids=str
)
@pytest.mark.parametrize("spoilt", [slice(None), slice(0, None, 2), slice(700, 701), slice(VOCAB - 1, None)], ids=str)
def test_a_row_with_nan_gives_some_token_and_its_neighbours_theirs(changes: dict[str, Any], spoilt: slice) -> None:
    rows = logits(3)
    rows[1, spoilt] = float("nan")
    tokens = api.sample(rows, *options(3, **changes))
    assert 0 <= int(tokens[1]) < VOCAB
    clean = rows[[0, 2]]
    assert tokens[[0, 2]].tolist() == api.sample(clean, *options(2, **changes)).tolist()
    chosen, top_values, top_ids = api.logprobs(rows, tokens, 5)
    assert chosen.isnan().tolist() == [False, True, False] and bool(top_values[1].isnan().all())
    assert bool(((top_ids >= 0) & (top_ids < VOCAB)).all())
    torch.testing.assert_close(top_values[[0, 2]], api.logprobs(clean, tokens[[0, 2]], 5)[1])


@pytest.mark.parametrize("changes", [{}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_an_infinite_logit_wins(changes: dict[str, Any]) -> None:
    rows = logits(2)
    rows[1, [700, 900]] = INF
    assert int(api.sample(rows, *options(2, **changes))[1]) == 700
