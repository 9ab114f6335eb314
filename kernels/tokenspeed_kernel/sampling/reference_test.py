# SPDX-License-Identifier: MIT
"""Sampling's definition: published Philox vectors, filters by brute force, and the distribution that is drawn."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.sampling.philox import LARGEST_UNIFORM, gumbel, philox, philox_words
from tokenspeed_kernel.sampling.reference import (
    apply_penalties,
    first_argmax,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    logprobs,
    sample,
)

# Known answers of Random123's philox4x32-10: counter, key, output.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
def test_philox_gives_the_published_words(counter: str, key: str, output: str) -> None:
    c, k = _words(counter), _words(key)
    assert [int(word) for word in philox(tuple(c), (k[0], k[1]))] == [int(word) for word in _words(output)]


def test_token_takes_word_v_mod_4_of_counter_v_div_4_and_position() -> None:
    seed, position = 0x299F31D0A4093822, (5 << 32) | 7
    words = philox_words(torch.tensor([seed]), torch.tensor([position]), 11)
    block = philox(
        (torch.tensor(2), torch.tensor(7), torch.tensor(5), torch.tensor(0)),
        (torch.tensor(0xA4093822), torch.tensor(0x299F31D0)),
    )
    assert words[0, 8:].tolist() == [int(word) for word in block[:3]]


def test_noise_is_finite_for_every_word() -> None:
    top = torch.tensor([0, 2**24 - 1, 2**24 - 2])
    u = (top.float() * 2.0**-24 + 2.0**-25).clamp(max=LARGEST_UNIFORM)
    assert torch.isfinite(-torch.log(-torch.log(u))).all()


def test_noise_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.tensor([5, 2**61, 5]), torch.tensor([0, 3, 1])
    together = gumbel(seeds, positions, 70)
    alone = gumbel(seeds[1:2], positions[1:2], 70)
    assert torch.equal(together[1:2], alone)
    assert not torch.equal(together[0], together[2])


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])
    n = 20_000
    off = torch.zeros(n)
    tokens = sample(
        logits.expand(n, 5), torch.full((n,), 0.8), off.int(), off + 1, off, torch.full((n,), 11), torch.arange(n)
    )
    expected = (logits[0] / 0.8).softmax(0) * n
    counts = torch.bincount(tokens, minlength=5)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # 4 degrees of freedom, one in a thousand; the seed is fixed


def test_temperature_zero_takes_the_lowest_id_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    one, zero = torch.ones(1), torch.zeros(1)
    assert sample(logits, zero, zero.int(), one, zero, zero.long(), zero.long()).tolist() == [1]


def test_smallest_temperature_still_takes_the_largest_logit() -> None:
    logits = torch.tensor([[1.0, 900.0, 899.0]])
    one, zero = torch.ones(1), torch.zeros(1)
    assert sample(logits, one * 1e-38, zero.int(), one, zero, zero.long(), zero.long()).tolist() == [1]


def test_top_k_keeps_k_tokens_and_those_equal_to_the_last() -> None:
    scaled = torch.tensor([[4.0, 2.0, 3.0, 2.0, 1.0]]).expand(4, 5)
    kept = keep_top_k(scaled, torch.tensor([2, 3, 0, 5], dtype=torch.int32))
    assert (kept > float("-inf")).int().tolist() == [[1, 0, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5, [1] * 5]


def test_top_p_keeps_the_fewest_likely_tokens_that_reach_p() -> None:
    scaled = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(5, 4)
    kept = keep_top_p(scaled, torch.tensor([0.0, 0.5, 0.6, 0.9, 1.0]))
    assert (kept > float("-inf")).sum(1).tolist() == [1, 1, 2, 3, 4]


def test_min_p_is_relative_to_the_likeliest() -> None:
    scaled = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert (keep_min_p(scaled, torch.tensor([0.25])) > float("-inf")).sum() == 3


def test_first_argmax_of_a_row_without_a_token_is_zero() -> None:
    assert first_argmax(torch.full((1, 4), float("-inf"))).tolist() == [0]


def test_penalties_follow_their_formulas_on_the_rows_slot() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 3.0]])
    counts = torch.tensor([[9, 9, 9, 9], [2, 0, 0, 0]], dtype=torch.int32)
    prompt = torch.tensor([[True] * 4, [False, True, False, False]])
    apply_penalties(
        logits, torch.tensor([1]), counts, prompt, torch.tensor([2.0]), torch.tensor([0.25]), torch.tensor([0.125])
    )
    assert logits.tolist() == [[2.0 / 2 - 2 * 0.25 - 0.125, -2.0 * 2, 1.0, 3.0]]


def test_logprobs_are_of_the_raw_logits_with_lowest_id_first_among_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]])
    chosen, values, ids = logprobs(logits, torch.tensor([3], dtype=torch.int32), 3)
    expected = logits.log_softmax(1)[0]
    assert ids.tolist() == [[1, 2, 3]]
    torch.testing.assert_close(chosen, expected[3:])
    torch.testing.assert_close(values[0], expected[[1, 2, 3]])
