# SPDX-License-Identifier: MIT
"""Each text check finds what it is for, and leaves good files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lint.text_checks import SPDX, check_essay, check_length, check_licence, check_words

PY = Path("a.py")


def test_licence_stands_in_the_first_line_or_after_the_interpreter() -> None:
    assert not list(check_licence(PY, [f"# {SPDX}", "x = 1"]))
    assert not list(check_licence(Path("run"), ["#!/bin/sh", f"# {SPDX}"]))
    assert list(check_licence(PY, ["x = 1", f"# {SPDX}"]))
    assert list(check_licence(Path("run"), ["#!/bin/sh", "echo"]))


def test_files_that_are_no_source_and_empty_ones_need_no_licence() -> None:
    assert not list(check_licence(Path("a.md"), ["# Title"]))
    assert not list(check_licence(Path("__init__.py"), []))


def test_a_module_needs_an_essay_of_bounded_length() -> None:
    assert not list(check_essay(PY, ['"""What it owns."""', "x = 1"]))
    assert list(check_essay(PY, ["x = 1"]))
    assert list(check_essay(PY, ['"""First.', *["more"] * 15, '"""']))
    assert list(check_essay(PY, ["def ("]))


def test_the_limit_itself_is_allowed() -> None:
    assert not list(check_length(PY, ["x"] * 500))
    assert list(check_length(PY, ["x"] * 501))
    assert not list(check_length(Path("lock.txt"), ["x"] * 501))


@pytest.mark.parametrize(
    "line",
    [
        "# TODO: later",
        "path = '/work/main/x'",
        "see /root/.cache/x",
        "see /home/someone/x",
        "url = 'https://mirror.internal.corp.lan/simple'",
        "url = 'https://user:secret@mirror.corp.lan/x'",
        "x = 1 ",
    ],
)
def test_words_that_must_not_be_there_are_found(line: str) -> None:
    assert [number for number, _ in check_words(PY, ["ok", line])] == [2]


@pytest.mark.parametrize(
    "line",
    [
        "https://github.com/x/y and https://arxiv.org/abs/z",
        "http://127.0.0.1:8000/v1 or http://localhost:8000",
        "f'http://{host}:{port}/v1'",
        "the home folder is ~/.cache; bazel-work/x; homework/x",
        "/usr/bin/env /tmp/smg-zmq /v1/workers /workers/x",
    ],
)
def test_ordinary_lines_pass(line: str) -> None:
    assert not list(check_words(PY, [line]))
