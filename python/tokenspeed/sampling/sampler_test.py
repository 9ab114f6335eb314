# SPDX-License-Identifier: MIT
"""Draws follow the distribution that the parameters define, and nobody's depend on anybody else's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.sampling import SampleOutput, Sampler, SamplerConfig

VOCAB, EOS = 12, 3
NUM_DRAWS = 50_000
LOGITS = torch.tensor([2.0, 1.0, 0.0, 1.5, -1.0, 0.5, 2.5, -2.0, 0.25, 1.25, -0.5, 0.75])


def sampler(num_slots: int = 8) -> Sampler:
    return Sampler(SamplerConfig(num_slots, VOCAB, torch.device("cpu"), (EOS,)))


def put(it: Sampler, slot: int, prompt: Sequence[int] = (0,), output: Sequence[int] = (), **params: Any) -> None:
    it.set_slot(slot, SamplingParams(**params), np.array(prompt, np.int32), np.array(output, np.int32), None)


def draw(it: Sampler, slots: list[int], positions: list[int], num_logprobs: int | None = None) -> SampleOutput:
    logits = LOGITS.repeat(len(slots), 1)
    it.prepare(np.array(slots))
    return it.sample(logits, torch.tensor(slots), torch.tensor(positions), num_logprobs)


def frequencies(**params: Any) -> torch.Tensor:
    """How often each token is drawn in NUM_DRAWS independent positions of one request."""
    rows = 500
    it = sampler(rows)
    for slot in range(rows):
        put(it, slot, seed=slot, **params)
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for position in range(NUM_DRAWS // rows):
        tokens = draw(it, list(range(rows)), [position] * rows).tokens
        counts += torch.bincount(tokens.long(), minlength=VOCAB)
    return counts


def assert_drawn_from(counts: torch.Tensor, logits: torch.Tensor) -> None:
    """Chi-square at one in ten thousand; seeds are fixed, so this passes always or never."""
    expected = logits.softmax(0) * NUM_DRAWS
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    degrees = int(inside.sum()) - 1
    chi_square = float(((counts - expected)[inside] ** 2 / expected[inside]).sum())
    assert chi_square < degrees + 3.72 * (2 * degrees) ** 0.5 + 8, chi_square


def only(*tokens: int) -> torch.Tensor:
    kept = torch.full((VOCAB,), float("-inf"))
    kept[list(tokens)] = 0.0
    return kept


LIKELIEST = LOGITS.argsort(descending=True).tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, LOGITS),
        ({"temperature": 0.5}, LOGITS * 2),
        ({"temperature": 3.0}, LOGITS / 3),
        ({"top_k": 3}, LOGITS + only(*LIKELIEST[:3])),
        ({"top_k": 10**12}, LOGITS),
        ({"top_p": 0.5}, LOGITS + only(*LIKELIEST[:2])),
        ({"min_p": 0.3}, LOGITS + only(*(i for i in range(VOCAB) if LOGITS[i] >= 2.5 + np.log(0.3)))),
        ({"top_k": 5, "top_p": 0.9, "temperature": 2.0}, LOGITS / 2 + only(*LIKELIEST[:5])),
        ({"logit_bias": {7: 4.0, 6: -100.0}}, LOGITS + torch.eye(VOCAB)[7] * 4 + torch.eye(VOCAB)[6] * -100),
    ],
)
def test_draws_follow_the_transformed_distribution(params: dict[str, Any], expected: torch.Tensor) -> None:
    assert_drawn_from(frequencies(**params), expected)


def test_greedy_takes_the_largest_logit_by_temperature_or_by_top_k() -> None:
    it = sampler()
    put(it, 0, temperature=0)
    put(it, 1, top_k=1, seed=5)
    put(it, 2, temperature=1.0, seed=5)
    assert draw(it, [0, 1], [9, 9]).tokens.tolist() == [6, 6]
    assert draw(it, [2, 1, 0], [9, 9, 9]).tokens.tolist()[1:] == [6, 6]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    it = sampler()
    put(it, 0, temperature=0)
    tied = torch.zeros(1, VOCAB)
    tied[0, [5, 8]] = 1.0
    assert it.sample(tied, torch.tensor([0]), torch.tensor([4]), None).tokens.tolist() == [5]


def test_draws_do_not_depend_on_batch_mates_or_slots() -> None:
    alone = sampler()
    put(alone, 0, seed=42, top_p=0.9)
    expected = [int(draw(alone, [0], [position]).tokens[0]) for position in range(30)]
    crowd = sampler()
    put(crowd, 5, seed=42, top_p=0.9)
    put(crowd, 1, seed=42, repetition_penalty=1.5, logit_bias={4: 3.0}, min_new_tokens=3)
    put(crowd, 2, temperature=0)
    put(crowd, 3, seed=7, min_p=0.1)
    mixed = [int(draw(crowd, [1, 3, 5, 2], [9, 1, position, 3]).tokens[2]) for position in range(30)]
    assert mixed == expected
    assert len(set(expected)) > 3


def test_seeds_and_positions_give_different_draws() -> None:
    it = sampler()
    put(it, 0, seed=1)
    put(it, 1, seed=2)
    rows = [draw(it, [0, 1], [position, position]).tokens.tolist() for position in range(60)]
    assert len({row[0] for row in rows}) > 3
    assert sum(a == b for a, b in rows) < 30


def test_penalties_count_prompt_and_output_as_they_grow() -> None:
    it = sampler()
    put(it, 0, prompt=[6], temperature=0, repetition_penalty=1.6)
    # 6 stands in the prompt: 2.5 / 1.6 < 2.0, so 0 wins; then 0 is penalised too, and so on.
    assert [int(draw(it, [0], [position]).tokens[0]) for position in range(1, 4)] == [0, 6, 6]


def test_frequency_and_presence_penalties_see_output_only() -> None:
    it = sampler()
    put(it, 0, prompt=[6, 6], temperature=0, frequency_penalty=0.4)
    assert [int(draw(it, [0], [p]).tokens[0]) for p in range(2, 7)] == [6, 6, 0, 6, 0]
    put(it, 0, prompt=[6, 6], temperature=0, presence_penalty=2.0)
    assert [int(draw(it, [0], [p]).tokens[0]) for p in range(2, 7)] == [6, 0, 3, 9, 1]


def test_output_before_a_retraction_counts_again() -> None:
    it = sampler()
    put(it, 0, prompt=[1], output=[6, 0, 6], temperature=0, frequency_penalty=0.9)
    # 6: 2.5 - 1.8 = 0.7; 0: 2.0 - 0.9 = 1.1; so 3 with 1.5 wins.
    assert draw(it, [0], [4]).tokens.tolist() == [3]


def test_slot_forgets_the_request_before() -> None:
    it = sampler()
    put(it, 0, prompt=[6], output=[0, 0], temperature=0, frequency_penalty=2.0, repetition_penalty=2.0)
    put(it, 0, temperature=0, logit_bias={7: 100.0}, min_new_tokens=4)
    assert draw(it, [0], [1]).tokens.tolist() == [7]
    put(it, 0, prompt=[1], temperature=0, frequency_penalty=0.1)
    assert draw(it, [0], [1]).tokens.tolist() == [6]
    put(it, 0, temperature=0)
    put(it, 1, temperature=0, logit_bias={2: 100.0})
    assert draw(it, [0, 1], [1, 1]).tokens.tolist() == [6, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_barred_until_min_new_tokens(temperature: float) -> None:
    it = sampler()
    bias = {EOS: 50.0, 8: 40.0, 2: 30.0}
    put(it, 0, [1, 1], temperature=temperature, seed=1, min_new_tokens=3, logit_bias=bias, stop_token_ids=(8,))
    # Two prompt tokens: new tokens at positions 2, 3 and 4 may not end the request.
    assert [int(draw(it, [0], [position]).tokens[0]) for position in range(2, 7)] == [2, 2, 2, EOS, EOS]


def test_end_token_is_no_stop_for_a_request_that_ignores_it() -> None:
    it = sampler()
    put(it, 0, temperature=0, min_new_tokens=9, ignore_eos=True, stop_token_ids=(8,), logit_bias={EOS: 50, 8: 60})
    assert draw(it, [0], [1]).tokens.tolist() == [EOS]


def test_long_bias_lists_fit() -> None:
    it = sampler()
    put(it, 0, temperature=0, logit_bias={token: -10.0 for token in range(VOCAB) if token != 10})
    put(it, 1, temperature=0, logit_bias={4: 9.0})
    assert draw(it, [1, 0], [1, 1]).tokens.tolist() == [4, 10]


def test_logprobs_are_of_the_raw_logits_whatever_the_request_changes() -> None:
    it = sampler()
    put(it, 0, prompt=[6], temperature=0, logit_bias={7: 100.0}, repetition_penalty=2.0)
    out = draw(it, [0], [1], num_logprobs=3)
    expected = LOGITS.log_softmax(0)
    assert out.tokens.tolist() == [7]
    assert out.token_logprobs is not None and out.top_ids is not None and out.top_values is not None
    torch.testing.assert_close(out.token_logprobs, expected[7:8])
    assert out.top_ids.tolist() == [LIKELIEST[:3]]
    torch.testing.assert_close(out.top_values[0], expected[LIKELIEST[:3]])


def test_logprobs_only_when_asked_for() -> None:
    it = sampler()
    put(it, 0, temperature=0)
    put(it, 1, seed=3)
    assert draw(it, [0, 1], [1, 1]).token_logprobs is None
    none_of_the_others = draw(it, [0, 1], [1, 1], num_logprobs=0)
    assert none_of_the_others.token_logprobs is not None
    assert none_of_the_others.top_ids is not None
    assert none_of_the_others.top_ids.shape == (2, 0)
    torch.testing.assert_close(draw(it, [0], [1], num_logprobs=0).token_logprobs, LOGITS.log_softmax(0)[6:7])


def test_draw_without_a_seed_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a seed"):
        put(sampler(), 0, temperature=1.0)


def test_rows_with_nan_are_told_and_change_nothing_for_others() -> None:
    plain = sampler()
    watching = Sampler(SamplerConfig(8, VOCAB, torch.device("cpu"), (EOS,), detects_nan=True))
    for it in (plain, watching):
        put(it, 0, seed=3, top_p=0.9)
        put(it, 1, temperature=0, repetition_penalty=1.2)
    logits = LOGITS.repeat(3, 1)
    slots, positions = torch.tensor([0, 2, 1]), torch.tensor([5, 5, 5])
    put(watching, 2, seed=3)
    spoilt = logits.clone()
    spoilt[1, 4] = float("nan")
    out = watching.sample(spoilt, slots, positions, 2)
    assert out.nan_rows is not None and out.nan_rows.tolist() == [False, True, False]
    want = plain.sample(logits[[0, 2]].clone(), slots[[0, 2]], positions[:2], 2)
    assert want.nan_rows is None, "nobody looked"
    assert out.tokens[[0, 2]].tolist() == want.tokens.tolist()
    assert 0 <= int(out.tokens[1]) < VOCAB
    assert watching.plain_draw(np.array([0]), None) is None, "a captured draw does not look"


def test_results_are_exact_with_steps_in_flight() -> None:
    """The counts of step n are there for step n + 1 though nothing has read step n's token."""
    it, launched = sampler(), []
    put(it, 0, temperature=0, frequency_penalty=0.3)
    for position in range(1, 7):
        launched.append(draw(it, [0], [position]).tokens)
    counts, expected = torch.zeros(VOCAB), []
    for _ in range(6):
        token = int((LOGITS - 0.3 * counts).argmax())
        counts[token] += 1
        expected.append(token)
    assert [int(tokens[0]) for tokens in launched] == expected
