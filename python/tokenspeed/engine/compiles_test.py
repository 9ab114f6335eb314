# SPDX-License-Identifier: MIT
"""Compilations count from ready on, and until the engine has ended."""

from __future__ import annotations

import logging
import time

import pytest

from tokenspeed.engine.compiles import LateCompiles

triton = pytest.importorskip("triton")


def test_what_the_compiler_reports_counts_between_watch_and_stop(caplog: pytest.LogCaptureFixture) -> None:
    took_s: list[float] = []
    late, other = LateCompiles(took_s.append), LateCompiles(took_s.append)
    other.stop()
    late.watch()
    with caplog.at_level(logging.WARNING, logger="tokenspeed.engine"):
        assert triton.knobs.runtime.jit_cache_hook(key="k", fn=None) is False
        time.sleep(0.02)
        triton.knobs.runtime.jit_post_compile_hook(key="k", repr="decode_kernel[num_warps=4]", fn=None)
    assert late.count == 1 and "decode_kernel" in caplog.text
    late.stop()
    assert len(took_s) == 1 and 0.02 <= took_s[0] < 5
    assert triton.knobs.runtime.jit_post_compile_hook is None and triton.knobs.runtime.jit_cache_hook is None


def test_the_last_engine_to_watch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    took_s: list[float] = []
    first, second = LateCompiles(took_s.append), LateCompiles(took_s.append)
    first.watch()
    second.watch()
    first.stop()
    with caplog.at_level(logging.ERROR):
        triton.knobs.runtime.jit_post_compile_hook(repr="kernel")
    assert (first.count, second.count) == (0, 1)
    second.stop()
