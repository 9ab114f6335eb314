# SPDX-License-Identifier: MIT
"""The tokens around a gap, by family: the order that each family's own documentation gives."""

from __future__ import annotations

import pytest

from tokenspeed.gateway.text.fill import fill_form

BEFORE, BEHIND = [1, 2], [3]
FIRST = 100
"""Of ids of the special tokens, in the order in which a test names them."""


def arranged(*vocabulary: str) -> list[int] | None:
    """The prompt for a vocabulary with these tokens."""
    ids = {text: FIRST + number for number, text in enumerate(vocabulary)}
    form = fill_form(ids.get)
    return None if form is None else form.prompt(BEFORE, BEHIND)


@pytest.mark.parametrize(
    "tokens",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ],
    ids=lambda tokens: tokens[0],
)
def test_most_families_read_what_is_before_then_what_is_behind(tokens: tuple[str, str, str]) -> None:
    assert arranged(*tokens) == [100, 1, 2, 101, 3, 102]
    assert arranged(*tokens[:2]) is None  # not all of them


def test_codestral_reads_what_is_behind_first() -> None:
    assert arranged("[PREFIX]", "[SUFFIX]", "[MIDDLE]") == [101, 3, 100, 1, 2]


def test_a_model_that_was_not_trained_for_it_has_no_form() -> None:
    assert arranged("<|endoftext|>", "<|im_start|>") is None


def test_a_middle_ends_at_tokens_that_have_no_place_in_it() -> None:
    vocabulary = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>", "other")
    form = fill_form({text: number for number, text in enumerate(vocabulary)}.get)
    assert form is not None and form.ends == {0, 1, 2, 3, 4}
