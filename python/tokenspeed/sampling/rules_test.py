# SPDX-License-Identifier: MIT
"""Rules that narrow what may come: by themselves, and through the sampler with steps in flight."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.sampling import ProcessorError, Sampler, SamplerConfig, load_processor
from tokenspeed.sampling.rules import (
    DEAD_END,
    BadSequences,
    FixedRule,
    GrammarRule,
    RequestRules,
    RowFailure,
    bits_of,
    num_words,
)

VOCAB, EOS = 70, 3


def tokens_of(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return set(np.flatnonzero(bits).tolist())


class Counting:
    """A matcher of the texts 10 11 12 ..., complete after `length` tokens."""

    def __init__(self, length: int, goes_on: bool) -> None:
        self.length, self.goes_on = length, goes_on
        self.seen: list[int] = []
        self.is_terminated = False

    def accept(self, token_id: int) -> bool:
        if token_id == EOS:
            self.is_terminated = len(self.seen) >= self.length
            return self.is_terminated
        if token_id != 10 + len(self.seen):
            return False
        self.seen.append(token_id)
        return True

    def fill(self, row: np.ndarray) -> None:
        complete = len(self.seen) >= self.length
        allowed = [10 + len(self.seen)] if not complete or self.goes_on else []
        row[:] = bits_of([*allowed, *([EOS] if complete else [])], VOCAB)


class CountingGrammar:
    def __init__(self, length: int, goes_on: bool = False) -> None:
        self.length, self.goes_on = length, goes_on

    def matcher(self, stop_token_ids: Sequence[int]) -> Counting:
        return Counting(self.length, self.goes_on)


class Bench:
    """One request in a sampler of two slots; logits like every token the same, the lowest wins."""

    def __init__(self, grammar: CountingGrammar | None = None, output: Sequence[int] = (), **params: Any) -> None:
        self.sampler = Sampler(SamplerConfig(2, VOCAB, torch.device("cpu"), (EOS,)))
        values = SamplingParams(**{"temperature": 0, **params})
        self.sampler.set_slot(1, values, np.zeros(1, np.int32), np.array(output, np.int32), grammar)
        self.position = 1 + len(output)
        self.failures: list[tuple[int, RowFailure]] = []

    def step(self, logits: torch.Tensor | None = None) -> int:
        slots = np.array([1])
        self.sampler.prepare(slots)
        drawn = self.sampler.sample(
            torch.zeros(1, VOCAB) if logits is None else logits.clone(),
            torch.tensor([1]),
            torch.tensor([self.position]),
            None,
            slots,
        )
        self.position += 1
        self.failures = drawn.failures
        return int(drawn.tokens[0])

    def run(self, count: int) -> list[int]:
        return [self.step() for _ in range(count)]


def test_masks_hold_the_bits_of_their_tokens() -> None:
    assert num_words(VOCAB) == 3
    assert tokens_of(bits_of([0, 31, 32, 69], VOCAB)) == {0, 31, 32, 69}
    assert tokens_of(~bits_of([5], VOCAB)) == set(range(VOCAB)) - {5}


def test_sequences_bar_their_last_token_after_the_others_only() -> None:
    rule = BadSequences([(7, 8), (1, 2, 3)])
    for token, barred in ((7, {8}), (1, set()), (2, {3}), (7, {8}), (8, set())):
        rule.accept(token)
        mask = np.full(3, -1, np.int32)
        rule.narrow(mask)
        assert tokens_of(mask) == set(range(VOCAB)) - barred


def test_rules_meet_and_tell_when_only_an_end_is_left() -> None:
    stops = bits_of([EOS], VOCAB)
    rules = RequestRules([FixedRule(bits_of([1, 2, EOS], VOCAB)), FixedRule(~bits_of([1, 2], VOCAB))], stops, None)
    mask = np.zeros(3, np.int32)
    assert rules.fill(mask) and tokens_of(mask) == {EOS}


def test_a_grammar_without_a_way_on_is_a_failure() -> None:
    stops = bits_of([EOS], VOCAB)
    rules = RequestRules([FixedRule(bits_of([1], VOCAB)), GrammarRule(Counting(3, False), stops)], stops, None)
    mask = np.zeros(3, np.int32)
    assert rules.failure is None
    assert rules.fill(mask) and rules.failure is DEAD_END
    bench = Bench(CountingGrammar(3), bad_token_ids=((12,),))
    assert bench.run(2) == [10, 11] and bench.failures == []
    bench.step()
    assert bench.failures == [(0, DEAD_END)]


def test_a_complete_text_ends_though_its_end_is_not_among_the_allowed_tokens() -> None:
    bench = Bench(CountingGrammar(2), allowed_token_ids=(10, 11, 12))
    assert bench.run(3) == [10, 11, EOS] and bench.failures == []


def test_a_token_that_its_grammar_did_not_foresee_is_a_failure_of_ours() -> None:
    rule = GrammarRule(Counting(3, False), bits_of([EOS], VOCAB))
    rule.accept(55)
    assert rule.failure is not None
    assert (rule.failure.status, rule.failure.code) == (500, "grammar_failed") and "55" in rule.failure.message


def test_lists_that_bar_every_token_together_are_a_failure() -> None:
    bench = Bench(allowed_token_ids=(40, 41), bad_token_ids=((40,), (41,)))
    bench.step()
    ((row, failure),) = bench.failures
    assert (row, failure.code, failure.field) == (0, "no_token_left", "allowed_token_ids")


def test_the_output_follows_its_grammar_and_ends_with_it() -> None:
    assert Bench(CountingGrammar(3)).run(5) == [10, 11, 12, EOS, EOS]


def test_a_request_that_comes_back_goes_on_where_it_was() -> None:
    assert Bench(CountingGrammar(4), output=[10, 11]).run(3) == [12, 13, EOS]


def test_minimum_and_ignored_end_hold_a_complete_text_back_while_it_can_go_on() -> None:
    assert Bench(CountingGrammar(2, goes_on=True)).run(3) == [10, 11, EOS]
    assert Bench(CountingGrammar(2, goes_on=True), min_new_tokens=4).run(5) == [10, 11, 12, 13, EOS]
    assert Bench(CountingGrammar(2, goes_on=True), ignore_eos=True).run(6) == [10, 11, 12, 13, 14, 15]
    assert Bench(CountingGrammar(2), ignore_eos=True, min_new_tokens=9).run(3) == [10, 11, EOS]


def test_allowed_and_bad_tokens_shape_the_draw() -> None:
    assert Bench(allowed_token_ids=(40, 41)).run(2) == [40, 40]
    assert Bench(bad_token_ids=((0,), (1, 1), (1, 2))).run(4) == [1, 3, 1, 3]


def test_a_slots_next_request_has_none_of_the_rules_before() -> None:
    bench = Bench(allowed_token_ids=(40,))
    assert bench.step() == 40
    bench.sampler.set_slot(1, SamplingParams(temperature=0), np.zeros(1, np.int32), np.zeros(0, np.int32), None)
    assert bench.step() == 0


def test_a_processor_sees_the_output_so_far_and_changes_logits() -> None:
    seen: list[list[int]] = []

    def favour_next(output_ids: list[int], logits: torch.Tensor) -> None:
        seen.append(list(output_ids))
        logits[20 + len(output_ids)] += 5

    assert Bench(logits_processor=favour_next).run(3) == [20, 21, 22]
    assert seen == [[], [20], [20, 21]]


def test_a_processor_that_fails_ends_its_own_request() -> None:
    def broken(output_ids: list[int], logits: torch.Tensor) -> None:
        raise ZeroDivisionError

    bench = Bench(logits_processor=broken)
    bench.step()
    ((row, failure),) = bench.failures
    assert (row, failure.status, failure.field) == (0, 400, "custom_logit_processor")
    assert "ZeroDivisionError" in failure.message


class Favour:
    """As clients of servers with serialised processors write them."""

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        logits[:, params[0]["token"]] += 9
        return logits


def test_a_serialised_processor_is_called_with_its_parameters() -> None:
    text = json.dumps({"callable": pickle.dumps(Favour).hex()})
    assert Bench(custom_logit_processor=text, custom_params={"token": 33}).run(2) == [33, 33]


@pytest.mark.parametrize("text", ["", "{}", '{"callable": "zz"}', json.dumps({"callable": pickle.dumps(5).hex()})])
def test_what_is_no_processor_is_told(text: str) -> None:
    with pytest.raises(ProcessorError):
        load_processor(text, None)
