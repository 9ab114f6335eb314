# SPDX-License-Identifier: MIT
"""Ids become the same text for every cut, also where characters are cut, and where bytes are no UTF-8."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.gateway.text.detokenizer import Detokenizer
from tokenspeed.gateway.text.vocabulary import TokenSpelling, Vocabulary, byte_characters

_CHARACTERS = {byte: character for character, byte in byte_characters().items()}
_BYTE_LEVEL = [_CHARACTERS[byte] for byte in range(256)] + ["<|end|>"]
_SENTENCEPIECE = [f"<0x{byte:02X}>" for byte in range(256)] + ["<s>", "\u2581Hello", "\u2581world", "\u2581", "!"]


def vocabulary(pieces: list[str], spelling: TokenSpelling, special: set[int]) -> Vocabulary:
    return Vocabulary(len(pieces), lambda i: pieces[i], spelling, frozenset(special), frozenset(special))


BYTES = vocabulary(_BYTE_LEVEL, TokenSpelling.BYTE_LEVEL, {256})
PIECES = vocabulary(_SENTENCEPIECE, TokenSpelling.SENTENCEPIECE, {256})


def run(words: Vocabulary, groups: list[list[int]], *, skip: bool = True, continues: bool = True) -> str:
    machine = Detokenizer(words, hidden=words.special if skip else frozenset(), continues=continues)
    return "".join([machine.feed(group) for group in groups]) + machine.close()


@pytest.mark.parametrize(
    "data",
    [
        "안녕하세요 🙂👍🏽 grüße".encode(),
        b"ok \xff\xfe bad \xe2\x82",
        b"\xf0\x9f\x99\x82\xf0\x9f\x99",
        b"\xed\xa0\x80 surrogate",
        b"",
    ],
)
def test_every_pair_of_cuts_gives_the_text_of_the_whole(data: bytes) -> None:
    ids = list(data)
    expected = data.decode("utf-8", "replace")
    for i, j in itertools.combinations_with_replacement(range(len(ids) + 1), 2):
        assert run(BYTES, [ids[:i], ids[i:j], ids[j:]]) == expected


@settings(max_examples=200, deadline=None)
@given(groups=st.lists(st.lists(st.integers(0, 256), max_size=6), max_size=6), skip=st.booleans())
def test_any_ids_and_cuts_give_the_text_of_the_whole(groups: list[list[int]], skip: bool) -> None:
    whole = [[token for group in groups for token in group]]
    assert run(BYTES, groups, skip=skip) == run(BYTES, whole, skip=skip)


def test_a_character_is_given_out_when_its_last_byte_has_come() -> None:
    machine = Detokenizer(BYTES, hidden=BYTES.special, continues=True)
    assert [machine.feed([byte]) for byte in "é안".encode()] == ["", "é", "", "", "안"]


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    ids = [[ord("a"), 256, ord("b")]]
    assert run(BYTES, ids, skip=True) == "ab"
    assert run(BYTES, ids, skip=False) == "a<|end|>b"


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    assert run(BYTES, [[ord("a"), 257, 100_000, -1, ord("b")]]) == "ab"


def test_sentencepiece_puts_spaces_back_and_takes_the_first_one_away_at_the_start_of_a_text() -> None:
    ids = [[256], [257], [258, 260]]
    assert run(PIECES, ids, continues=False) == "Hello world!"
    assert run(PIECES, ids, continues=True) == " Hello world!"


def test_sentencepiece_byte_tokens_join_into_characters() -> None:
    assert run(PIECES, [[257, 259], list("🙂".encode())[:2], list("🙂".encode())[2:]]) == " Hello 🙂"
