# SPDX-License-Identifier: MIT
"""Random calls of the sampling operations; they take float32 alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_kernel.numerics.case import Case, Dtype, normal


def penalties(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    """Some tokens seen, some not."""
    if dtype == torch.float32:
        counts = torch.randint(-3, 3, (5, 130), generator=generator).clamp(min=0).int()
        mask = torch.rand(5, 130, generator=generator) < 0.3
        factors = [torch.rand(3, generator=generator) * 2 + low for low in (0.5, -1.0, -1.0)]
        logits = normal(generator, 3, 130, std=3.0)
        args = (logits, torch.tensor([4, 0, 2]), counts, mask, *factors)
        yield Case("sampling.penalties", "three rows of five slots", dtype, args, mutated=(0,))


def token_mask(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    """Rows of random words, one that allows everything, vocabularies that end inside a word."""
    if dtype == torch.float32:
        for vocab_size in (32, 131, 2053):
            words = -(-vocab_size // 32)
            mask = torch.randint(-(2**31), 2**31, (3, words), generator=generator).int()
            mask[1] = -1
            mask[2, 0] = 0
            args = (normal(generator, 5, vocab_size, std=3.0), mask, torch.tensor([4, 0, 2]))
            yield Case("sampling.token_mask", f"three of five rows, {vocab_size} tokens", dtype, args, mutated=(0,))


def sample(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    """Every filter alone and with others, ties, and rows that keep nearly everything."""
    if dtype == torch.float32:
        settings = [
            (0.0, 0, 1.0, 0.0),
            (1.0, 0, 1.0, 0.0),
            (0.7, 5, 1.0, 0.0),
            (1.3, 0, 0.9, 0.0),
            (1.0, 0, 1.0, 0.1),
            (0.9, 40, 0.8, 0.02),
            (1.0, 1, 1.0, 0.0),
            (1e-30, 0, 1.0, 0.0),
            (1.0, 0, 0.0, 0.0),
            (1.0, 10_000, 0.5, 0.0),
        ]
        for vocab_size in (4, 131, 2053):
            columns = list(zip(*settings, strict=True))
            logits = normal(generator, len(settings), vocab_size, std=3.0)
            logits[:, 2] = logits.amax(dim=1)  # equal largest logits
            logits[1, 3] = float("-inf")
            temperature, top_p, min_p = (torch.tensor(columns[i], dtype=torch.float32) for i in (0, 2, 3))
            top_k = torch.tensor(columns[1], dtype=torch.int32)
            seeds = torch.randint(0, 2**62, (len(settings),), generator=generator)
            positions = torch.randint(0, 2**40, (len(settings),), generator=generator)
            args = (logits, temperature, top_k, top_p, min_p, seeds, positions)
            yield Case("sampling.sample", f"every filter, vocabulary {vocab_size}", dtype, args)
        yield from _wide_samples(dtype, generator)


def _wide_samples(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    """More tokens kept than a solution may collect at once, by count, by weight, and all of one value."""
    settings = [(1.0, 3000, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.8, 2500, 0.95, 0.001), (2.0, 40, 0.5, 0.0)]
    columns = list(zip(*settings, strict=True))
    temperature, top_p, min_p = (torch.tensor(columns[i], dtype=torch.float32) for i in (0, 2, 3))
    top_k = torch.tensor(columns[1], dtype=torch.int32)
    for label, std in (("flat", 0.5), ("steep", 4.0), ("all equal", 0.0)):
        logits = normal(generator, len(settings), 8195, std=std)
        seeds = torch.randint(0, 2**62, (len(settings),), generator=generator)
        positions = torch.randint(0, 2**40, (len(settings),), generator=generator)
        args = (logits, temperature, top_k, top_p, min_p, seeds, positions)
        yield Case("sampling.sample", f"{label}, vocabulary 8195", dtype, args)


def logprobs(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    """None, some, and a tie."""
    if dtype == torch.float32:
        for vocab_size, top_n in ((131, 0), (131, 5), (2053, 20)):
            logits = normal(generator, 3, vocab_size, std=3.0)
            logits[0, 3] = logits[0, 7]
            args = (logits, torch.tensor([1, 0, 130], dtype=torch.int32), top_n)
            yield Case("sampling.logprobs", f"top {top_n} of {vocab_size}", dtype, args)
