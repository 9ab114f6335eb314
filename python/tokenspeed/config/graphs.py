# SPDX-License-Identifier: MIT
"""Which steps are captured on a GPU and recorded on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

RECORDED_ROWS = 16
"""Of a CPU's decode steps, unless flags say more: a step of many rows is products, and Python little of it."""


@dataclass(frozen=True)
class GraphConfig:
    """sizes: batch sizes of decode steps, ascending; none for none. padded: whether a step may use a size larger than
    its own. prefill_sizes: tokens of steps that prefill, ascending, or none to choose them up to most_prefill_tokens,
    which None leaves to a measurement and 0 forbids. A CPU has sizes alone."""

    sizes: tuple[int, ...]
    padded: bool
    prefill_sizes: tuple[int, ...]
    most_prefill_tokens: int | None


def capture_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes worth a graph of their own: dense where one more row costs most, and the largest that traffic has."""
    dense = [1, 2, 3, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest, 64)]
    return (*[size for size in dense if size < largest], largest)
