# SPDX-License-Identifier: MIT
"""Stop strings give the same text for every cut, and nothing of a stop string is ever given out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.gateway.text.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text, matched = "", None
    for piece in pieces:
        emitted, now = matcher.feed(piece)
        text += emitted
        matched = matched or now
    return text + ("" if matched else matcher.close()), matched


def by_hand(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first ends the text right before it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


CASES = [
    (["DEFGHIJ"], "ABCDEFGHIJKL"),
    (["DEFGHIJ"], "ABCDEFGHI"),
    (["ab", "abc"], "xxabcxx"),
    (["bcd", "c"], "abcde"),
    (["aab"], "aaaab"),
    (["\n\n", "\nUser:"], "one\ntwo\nUser: three"),
    (["</s>"], "a < b </ s></s>tail"),
    (["안녕"], "그래 안 안녕하세요"),
    (["🙂"], "no 🙃 yes 🙂!"),
    (["x", "yx"], "ayx"),
    ([], "nothing stops this"),
]


@pytest.mark.parametrize(("stops", "text"), CASES)
def test_every_pair_of_cuts_gives_the_same_text_and_the_same_match(stops: list[str], text: str) -> None:
    expected = by_hand(stops, text)
    assert run(stops, [text]) == expected
    assert run(stops, list(text)) == expected
    for i, j in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert run(stops, [text[:i], text[i:j], text[j:]]) == expected


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("ab ", max_size=5), max_size=8),
)
def test_any_stops_and_cuts_agree_with_the_definition(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == by_hand(stops, "".join(pieces))


@settings(max_examples=200, deadline=None)
@given(stop=st.text("ab", min_size=1, max_size=5), text=st.text("ab", max_size=30))
def test_what_was_given_out_is_never_taken_back(stop: str, text: str) -> None:
    matcher = StopMatcher([stop])
    emitted = ""
    for character in text:
        piece, matched = matcher.feed(character)
        emitted += piece
        if matched:
            break
    assert by_hand([stop], text)[0].startswith(emitted)


def test_text_is_held_only_while_it_could_become_a_stop_string() -> None:
    matcher = StopMatcher(["DEF"])
    assert matcher.feed("ABCD") == ("ABC", None)
    assert matcher.feed("E") == ("", None)
    assert matcher.feed("G") == ("DEG", None)
    assert matcher.close() == ""


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("one. two") == ("one", ".")
    assert matcher.feed(" three.") == ("", None)
    assert matcher.close() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
