# SPDX-License-Identifier: MIT
"""Many draws of one request, counted: the frequencies that tests hold against a distribution.

Run as a module it draws by Triton's kernels under Triton's interpreter, which has to be chosen before Triton is
imported, and prints the counts of each case as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tokenspeed.config.sampling import SamplingParams, derive_seed
from tokenspeed.sampling import Sampler, SamplerConfig
from tokenspeed_kernel.registry import Band, anywhere, kernel, override

VOCAB = 24
EOS = VOCAB - 1
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 2
PROMPT = [2, 20, 20, 14]
OUTPUT = [16, 10, 16, 10]
"""Drawn before the draws that are counted."""
ROWS = 500

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "presence_penalty": {"presence_penalty": -1.1},
    "logit_bias": {"logit_bias": {7: 4.0, 16: -2.0, 20: -100.0}},
    "min_new_tokens": {"min_new_tokens": 105, "stop_token_ids": [20], "logit_bias": {EOS: 9.0}},
    "allowed_token_ids": {"allowed_token_ids": [1, 4, 16, 22]},
    "bad_token_ids": {"bad_token_ids": [[20], [16, 10, 14], [10, 1], [16, 19], [1, 10, 19]]},
    "all filters": {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
}

_SOLUTIONS = ("sample", "penalties", "token_mask")


def count_draws(params: dict[str, Any], num_draws: int) -> list[int]:
    """How often each token came in draws of many seeds, each at several positions."""
    drawn = _draw(params, num_draws, lambda number: (number % ROWS, number // ROWS))
    counts: list[int] = torch.bincount(drawn, minlength=VOCAB).tolist()
    return counts


def count_pairs(params: dict[str, Any], num_draws: int, vary: str) -> list[list[int]]:
    """[before][token]: how often each token came right after another one, in the order of draws that differ by their
    "seed", "choice" (of n) or "position" alone."""
    of_draw: dict[str, Callable[[int], tuple[int, int]]] = {
        "seed": lambda number: (number, 0),
        "choice": lambda number: (derive_seed(17, number), 0),
        "position": lambda number: (17, number),
    }
    drawn = _draw(params, num_draws, of_draw[vary])
    pairs = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    pairs.index_put_((drawn.roll(1), drawn), torch.ones((), dtype=torch.int64), accumulate=True)
    counts: list[list[int]] = pairs.tolist()
    return counts


def _draw(params: dict[str, Any], num_draws: int, of_draw: Callable[[int], tuple[int, int]]) -> torch.Tensor:
    """int64 [num_draws]. of_draw: from a draw's number to its seed and how far on its position is."""
    sampler = Sampler(SamplerConfig(ROWS, VOCAB, torch.device("cpu"), (EOS,)))
    prompt, output = np.array(PROMPT, np.int32), np.array(OUTPUT, np.int32)
    history = {"repetition_penalty", "frequency_penalty", "presence_penalty", "bad_token_ids"}
    last, drawn = [-1] * ROWS, []
    for first in range(0, num_draws, ROWS):
        draws = [of_draw(number) for number in range(first, min(first + ROWS, num_draws))]
        for slot, (seed, _) in enumerate(draws):
            # What was drawn before must not count: these set their slot anew.
            if seed != last[slot] or history & set(params):
                values = SamplingParams(**{"temperature": 1.0, **params, "seed": seed})
                sampler.set_slot(slot, values, prompt, output, None)
                last[slot] = seed
        slots = np.arange(len(draws))
        positions = torch.tensor([len(PROMPT) + len(OUTPUT) + further for _, further in draws])
        sampler.prepare(slots)
        logits = LOGITS.repeat(len(draws), 1)
        drawn.append(sampler.sample(logits, torch.from_numpy(slots), positions, None, slots).tokens)
    return torch.cat(drawn).long()


def main(num_draws: int) -> int:
    """Print the counts of every case by Triton's kernels. Returns 0."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tokenspeed_kernel.sampling import triton_mask, triton_penalties, triton_sample

    kernels: tuple[Any, ...] = (triton_sample.sample, triton_penalties.apply_penalties, triton_mask.token_mask)
    for op, function in zip(_SOLUTIONS, kernels, strict=True):
        register = kernel(
            f"sampling.{op}", name="interpreted", needs=anywhere(), dtypes=(torch.float32,), band=Band.REFERENCE
        )
        register(function)
    with override({f"sampling.{op}": "interpreted" for op in _SOLUTIONS}):
        json.dump({name: count_draws(params, num_draws) for name, params in CASES.items()}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
