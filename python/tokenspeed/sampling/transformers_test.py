# SPDX-License-Identifier: MIT
"""The sampler's transforms against those of `transformers`: which tokens are left, and how probable they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.sampling import Sampler, SamplerConfig

VOCAB, ROWS, NUM_DRAWS = 24, 500, 50_000
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 2
PROMPT = [2, 5, 5, 11]


@pytest.mark.parametrize(
    ("params", "theirs"),
    [
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
        (
            {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
            [TemperatureLogitsWarper(1.5), TopKLogitsWarper(12), TopPLogitsWarper(0.9), MinPLogitsWarper(0.03)],
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fifty_thousand_draws_follow_the_distribution_of_transformers(params: dict[str, Any], theirs: Any) -> None:
    ids = torch.tensor([PROMPT])
    expected = LogitsProcessorList(theirs)(ids, LOGITS[None].clone())[0].softmax(0) * NUM_DRAWS
    sampler = Sampler(SamplerConfig(ROWS, VOCAB, torch.device("cpu"), (VOCAB - 1,)))
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    slots = np.arange(ROWS)
    for turn in range(NUM_DRAWS // ROWS):
        for slot in range(ROWS):
            values = SamplingParams(**{"temperature": 1.0, **params, "seed": turn * ROWS + slot})
            sampler.set_slot(slot, values, np.array(PROMPT, np.int32), np.zeros(0, np.int32), None)
        sampler.prepare(slots)
        drawn = sampler.sample(LOGITS.repeat(ROWS, 1), torch.from_numpy(slots), torch.full((ROWS,), 4), None, slots)
        counts += torch.bincount(drawn.tokens.long(), minlength=VOCAB)
    left = expected > 0
    assert counts[~left].sum() == 0
    degrees = int(left.sum()) - 1
    chi_square = float(((counts - expected)[left] ** 2 / expected[left]).sum())
    assert chi_square < degrees + 3.72 * (2 * degrees) ** 0.5 + 8, chi_square
