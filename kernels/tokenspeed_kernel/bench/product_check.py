# SPDX-License-Identifier: MIT
"""Dense products on a GPU at every number of rows: each solution against float32, and which bits depend on the batch.

`numerics.cases` holds what runs anywhere in a moment; here are the sizes at which GPU solutions change their tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from tokenspeed_kernel.gemm.signature import PRODUCT_TRAITS, product_traits
from tokenspeed_kernel.numerics.check import poisoned_outputs
from tokenspeed_kernel.numerics.tolerances import distance, tolerance
from tokenspeed_kernel.registry import KernelSpec, current_platform, solutions

# Every odd number of rows to past the largest tile, the edges of tiles, and prompts.
TOKENS = (*range(1, 301, 2), 2, 8, 16, 32, 64, 128, 192, 256, 512, 1000, 2049)
# Outputs and inputs: whole tiles, neither a whole tile nor a whole panel, and hardly anything of either.
SHAPES = ((6144, 4096), (1552, 1032), (144, 72))
_OPS = ("gemm.linear", "gemm.linear_silu_and_mul", "gemm.logits")

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_products(tokens: Iterable[int] = TOKENS) -> Iterator[str]:
    """What is wrong, a line each: sums that are off, rows of `cuda_invariant` that depend on the others."""
    generator = torch.Generator("cuda").manual_seed(0)
    counts = sorted(tokens)
    for outputs, inputs in SHAPES:
        weight = _normal(generator, outputs, inputs) * inputs**-0.5
        x = _normal(generator, counts[-1], inputs)
        for op in _OPS:
            expected = _reference(op, x, weight)
            for item in _candidates(op):
                yield from _check(item, x, weight, expected, counts)


def _normal(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator, device="cuda").bfloat16()


def _reference(op: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    reference = next(item for item in solutions(op) if item.name == "reference")
    return _call(reference, x, weight)


def _call(item: KernelSpec, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    args = (x, weight) if item.op == "gemm.logits" else (x, weight, None)
    with poisoned_outputs():
        out: torch.Tensor = item.fn(*args)
    return out


@functools.cache
def _candidates(op: str) -> list[KernelSpec]:
    """Our own solutions for bfloat16 on this GPU."""
    return [
        item
        for item in solutions(op)
        if item.name.startswith("cuda")
        and torch.bfloat16 in item.dtypes
        and item.needs.unmet(current_platform()) is None
    ]


def _check(
    item: KernelSpec, x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor, counts: list[int]
) -> Iterator[str]:
    bound = tolerance(item.op, torch.bfloat16)
    first: torch.Tensor | None = None
    for count in counts:
        rows = x[:count]
        traits = dict(zip(PRODUCT_TRAITS, product_traits(rows, weight), strict=True))
        if item.misfit("cuda", torch.bfloat16, traits) is not None:
            continue
        got = _call(item, rows, weight)
        name = f"{item.op}={item.name}, {count} rows by {tuple(weight.shape)}"
        if (off := distance(got, expected[:count], bound)) > 1:
            yield f"{name}: {off:.2f} of the tolerance"
        first = got[:1] if first is None else first
        if item.name.endswith("invariant") and not torch.equal(got[:1], first):
            yield f"{name}: the first row's bits are not those of a row alone"
