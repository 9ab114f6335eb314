# SPDX-License-Identifier: MIT
"""The sampler's transforms against those of `transformers`, on every backend that runs here: which tokens are left, and
how probable they are; and that draws of other seeds, choices and positions are draws of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.draws import CASES, EOS, LOGITS, OUTPUT, PROMPT, VOCAB, count_draws, count_pairs
from tests.support.processes import python_environment
from tokenspeed_kernel.registry import override

NUM_DRAWS, NUM_BY_REFERENCE, NUM_INTERPRETED = 50_000, 5_000, 100


class Counted(LogitsProcessor):
    """OpenAI's frequency and presence penalties, which `transformers` lacks: of the output, not of the prompt."""

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency, self.presence = frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, len(PROMPT) :], minlength=VOCAB)
        return scores - self.frequency * counts - self.presence * (counts > 0)


def bias(values: dict[int, float]) -> LogitsProcessor:
    return SequenceBiasLogitsProcessor([[[token], value] for token, value in values.items()])


# The same cases as `transformers` says them, in the order in which both apply them.
THEIRS: dict[str, Callable[[], Sequence[LogitsProcessor]]] = {
    "temperature": lambda: [TemperatureLogitsWarper(0.6)],
    "top_k": lambda: [TopKLogitsWarper(5)],
    "top_k beyond the vocabulary": lambda: [TopKLogitsWarper(1000)],
    "top_p": lambda: [TopPLogitsWarper(0.8)],
    "min_p": lambda: [MinPLogitsWarper(0.1)],
    "repetition_penalty": lambda: [RepetitionPenaltyLogitsProcessor(1.4)],
    "frequency_penalty": lambda: [Counted(0.7, 0.0)],
    "presence_penalty": lambda: [Counted(0.0, -1.1)],
    "logit_bias": lambda: [bias({7: 4.0, 16: -2.0, 20: -100.0})],
    "min_new_tokens": lambda: [
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 105, [EOS, 20]),
        bias({EOS: 9.0}),
    ],
    "allowed_token_ids": lambda: [PrefixConstrainedLogitsProcessor(lambda *_: [1, 4, 16, 22], 1)],
    "bad_token_ids": lambda: [NoBadWordsLogitsProcessor([[20], [16, 10, 14], [10, 1], [16, 19], [1, 10, 19]], [EOS])],
    "all filters": lambda: [
        TemperatureLogitsWarper(1.5),
        TopKLogitsWarper(12),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.03),
    ],
}


def expected(name: str) -> torch.Tensor:
    """Probabilities of the next token."""
    scores = LogitsProcessorList(THEIRS[name]())(torch.tensor([PROMPT + OUTPUT]), LOGITS[None].clone())
    probabilities: torch.Tensor = scores[0].softmax(0)
    return probabilities


def assert_drawn_from(counts: Sequence[int], probabilities: torch.Tensor) -> None:
    """Pearson's chi-square below its quantile at 1e-4, roughly; and nothing that cannot come."""
    told = torch.tensor(counts)
    # A bias of -100 leaves a token possible in name only.
    assert told[probabilities < 1e-9].sum() == 0
    want = probabilities * told.sum()
    # Tokens that come less than five times are one: the statistic is none of rare events.
    rare = want < 5
    told = torch.cat([told[~rare], told[rare].sum()[None]])
    want = torch.cat([want[~rare], want[rare].sum()[None]]).clamp(min=1)
    degrees = len(want) - 1
    chi_square = float(((told - want) ** 2 / want).sum())
    assert chi_square < degrees + 3.72 * (2 * degrees) ** 0.5 + 8, chi_square


def test_every_case_changes_the_distribution_but_the_one_that_asks_for_nothing() -> None:
    assert list(THEIRS) == list(CASES)
    plain = LOGITS.softmax(0)
    unchanged = [name for name in CASES if float((expected(name) - plain).abs().sum()) < 0.05]
    assert unchanged == ["top_k beyond the vocabulary"]


@pytest.mark.parametrize("name", CASES)
def test_fifty_thousand_draws_follow_the_distribution_of_transformers(name: str) -> None:
    assert_drawn_from(count_draws(CASES[name], NUM_DRAWS), expected(name))


@pytest.mark.parametrize("name", CASES)
def test_draws_of_the_reference_follow_the_distribution_of_transformers(name: str) -> None:
    with override({f"sampling.{op}": "reference" for op in ("sample", "penalties", "token_mask")}):
        assert_drawn_from(count_draws(CASES[name], NUM_BY_REFERENCE), expected(name))


def test_draws_of_tritons_kernels_follow_the_distribution_of_transformers() -> None:
    command = [sys.executable, "-m", "tests.support.draws", str(NUM_INTERPRETED)]
    environment = python_environment()
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    counts: dict[str, Any] = json.loads(result.stdout)
    assert list(counts) == list(CASES)
    for name, told in counts.items():
        assert sum(told) == NUM_INTERPRETED
        assert_drawn_from(told, expected(name))


@pytest.mark.parametrize("vary", ["seed", "choice", "position"])
def test_draws_that_differ_by_seed_choice_or_position_alone_know_nothing_of_each_other(vary: str) -> None:
    pairs = count_pairs({"temperature": 2.0, "top_k": 6}, NUM_DRAWS, vary)
    each = TopKLogitsWarper(6)(torch.tensor([[0]]), LOGITS[None] / 2)[0].softmax(0)
    assert_drawn_from([sum(column) for column in zip(*pairs)], each)
    assert_drawn_from(torch.tensor(pairs).flatten().tolist(), torch.outer(each, each).flatten())
