# SPDX-License-Identifier: MIT
"""The instruction sets that this machine's CPU kernels can be tested at, and a fixture body that switches to one.

Tests of cpu_* modules run at every level: the source is one, but registers, permutes and fused adds differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tokenspeed_kernel import _cpu


def isa_levels() -> list[str]:
    """Names of the levels that run here, best first; "baseline" always does."""
    best = _cpu.isa()
    levels = []
    for level in ("avx512", "avx2", "baseline"):
        with contextlib.suppress(ValueError):
            _cpu.use_isa(level)
            levels.append(level)
    _cpu.use_isa(best)
    return levels


@contextlib.contextmanager
def at_level(level: str) -> Iterator[str]:
    """Run the block's kernels at `level`, then return to the level before."""
    before = _cpu.isa()
    _cpu.use_isa(level)
    try:
        yield level
    finally:
        _cpu.use_isa(before)


@contextlib.contextmanager
def with_threads(count: int) -> Iterator[int]:
    """Run the block's kernels on `count` threads, then return to the number before."""
    before = _cpu.num_threads()
    _cpu.set_num_threads(count)
    try:
        yield count
    finally:
        _cpu.set_num_threads(before)
