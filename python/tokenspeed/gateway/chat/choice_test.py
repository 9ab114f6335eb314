# SPDX-License-Identifier: MIT
"""A choice gives the same text, logprobs, end and count for every cut of its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tokenspeed.gateway.chat.choice import Choice, TextRules, TokenLogprob, Tokens
from tokenspeed.gateway.text.vocabulary import TokenSpelling, Vocabulary, byte_characters

_CHARACTERS = {byte: character for character, byte in byte_characters().items()}
_PIECES = [_CHARACTERS[byte] for byte in range(256)] + ["<end>"]
END = 256
WORDS = Vocabulary(257, lambda i: _PIECES[i], TokenSpelling.BYTE_LEVEL, frozenset([END]), frozenset([END]))
RULES = TextRules(stop=(), include_stop=False, hidden=WORDS.special, continues=False, min_tokens=0, logprobs=False)

Result = tuple[str, list[TokenLogprob], str, object, int]


def run(rules: TextRules, ids: Sequence[int], finish: str, cuts: Sequence[int]) -> Result:
    choice = Choice(WORDS, rules)
    text, logprobs = "", list[TokenLogprob]()
    bounds = [0, *cuts, len(ids)]
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        last = i == len(cuts)
        chunk = ids[start:end]
        piece = choice.feed(
            Tokens(
                ids=chunk,
                logprobs=[-float(token) for token in chunk] if rules.logprobs else (),
                top_ids=(),
                top_logprobs=(),
                finish=finish if last else "",
                matched=ids[-1] if last and finish == "stop" else None,
            )
        )
        text += piece.text
        logprobs += piece.logprobs
        if piece.finish:
            return text, logprobs, piece.finish, piece.matched, choice.num_tokens
    raise AssertionError("the choice did not end")


CASES = [
    ("plain words", "length"),
    ("안녕 🙂 done", "stop"),
    ("one STO STOP two", "length"),
    ("ends with ST", "length"),
    ("", "stop"),
]


@pytest.mark.parametrize(("text", "finish"), CASES)
@pytest.mark.parametrize("stop", [(), ("STOP",), ("STOP", "🙂")])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 9])
def test_every_pair_of_cuts_gives_the_same_result(
    text: str, finish: str, stop: tuple[str, ...], logprobs: bool, min_tokens: int
) -> None:
    ids = [*text.encode(), *([END] if finish == "stop" else [])]
    rules = replace(RULES, stop=stop, logprobs=logprobs, min_tokens=min_tokens)
    whole = run(rules, ids, finish, [])
    # An engine sends the token that ends a choice together with the end.
    for cuts in itertools.combinations_with_replacement(range(len(ids) + (finish == "length")), 2):
        assert run(rules, ids, finish, cuts) == whole


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 256), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    include=st.booleans(),
)
def test_any_tokens_give_the_same_result_cut_anywhere(ids: list[int], cuts: list[int], include: bool) -> None:
    rules = replace(RULES, stop=("a", "bc"), logprobs=True, include_stop=include)
    bounds = sorted(min(cut, len(ids)) for cut in cuts)
    assert run(rules, ids, "length", bounds) == run(rules, ids, "length", [])


def test_the_stop_token_is_counted_but_not_shown() -> None:
    text, _, finish, matched, count = run(RULES, [*b"hi", END], "stop", [])
    assert (text, finish, matched, count) == ("hi", "stop", END, 3)
    shown = replace(RULES, include_stop=True, hidden=frozenset())
    assert run(shown, [*b"hi", END], "stop", [])[0] == "hi<end>"


def test_a_stop_string_is_not_looked_for_before_the_minimum_of_tokens() -> None:
    rules = replace(RULES, stop=("x",), min_tokens=3)
    assert run(rules, list(b"axbxc"), "length", [])[:1] == ("axb",)
    assert run(rules, list(b"xxxyx"), "length", [])[:1] == ("xxxy",)


def test_logprobs_wait_for_the_text_of_their_tokens() -> None:
    choice = Choice(WORDS, replace(RULES, logprobs=True))
    first, second, third = "안".encode()

    def feed(token: int) -> list[int]:
        piece = choice.feed(Tokens((token,), (-1.0,), (), (), "", None))
        return [entry.token_id for entry in piece.logprobs]

    assert [feed(first), feed(second), feed(third)] == [[], [], [first, second, third]]


def test_a_broken_character_at_the_end_is_shown_once() -> None:
    assert run(RULES, list("안".encode()[:2]), "length", [1])[0] == "\ufffd"
