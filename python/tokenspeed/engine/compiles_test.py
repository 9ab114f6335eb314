# SPDX-License-Identifier: MIT
"""Compilations count from ready on, and until the engine has ended."""

from __future__ import annotations

import logging

import pytest

from tokenspeed.engine.compiles import LateCompiles

triton = pytest.importorskip("triton")


def test_what_the_compiler_reports_counts_between_watch_and_stop(caplog: pytest.LogCaptureFixture) -> None:
    late, other = LateCompiles(), LateCompiles()
    other.stop()
    late.watch()
    with caplog.at_level(logging.WARNING, logger="tokenspeed.engine"):
        triton.knobs.runtime.jit_post_compile_hook(key="k", repr="decode_kernel[num_warps=4]", fn=None)
    assert late.count == 1 and "decode_kernel" in caplog.text
    late.stop()
    assert triton.knobs.runtime.jit_post_compile_hook is None


def test_the_last_engine_to_watch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    first, second = LateCompiles(), LateCompiles()
    first.watch()
    second.watch()
    first.stop()
    with caplog.at_level(logging.ERROR):
        triton.knobs.runtime.jit_post_compile_hook(repr="kernel")
    assert (first.count, second.count) == (0, 1)
    second.stop()
