# SPDX-License-Identifier: MIT
"""Patterns, lengths and formats of both backends, held against Python's `re` and `json` on what random walks write."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from tokenspeed.config.constraint import Constraint
from tokenspeed.grammar import Backend, Matcher, TokenTable, load_backend

EOS = 256
WORDS = [b'\\"', b"\\n", b"\\u00", b"00", b'"}', "é".encode(), "日本".encode(), b"\xed\xa0", b"\xe0\x80"]
TOKENS = [bytes([value]) for value in range(256)] + [b""] + WORDS
TABLE = TokenTable(TOKENS, {"<eos>": EOS}, (EOS,))
NUM_WALKS = 12
MAX_STEPS = 150


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param, TABLE, True)


def start(backend: Backend, kind: str, text: str) -> Matcher:
    return backend.compile(Constraint(kind, text, None).prepared()).matcher((EOS,))


def walked(it: Matcher, rng: random.Random) -> bytes | None:
    """A random text of the grammar; None where it did not come to its end."""
    out = b""
    row = np.zeros(-(-len(TOKENS) // 32), np.int32)
    for step in range(MAX_STEPS):
        it.fill(row)
        may = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(TOKENS)]).tolist()
        assert may, f"nothing may follow {out!r}"
        if EOS in may and (len(may) == 1 or rng.random() < 0.2):
            assert it.accept(EOS)
            return out
        weights = [20.0 if TOKENS[token] == b'"' and step > 20 else 1.0 for token in may]
        token = rng.choices(may, weights)[0]
        if token != EOS:
            assert it.accept(token)
            out += TOKENS[token]
    return None


def texts(backend: Backend, kind: str, text: str) -> list[str]:
    walks = [walked(start(backend, kind, text), random.Random(seed)) for seed in range(NUM_WALKS)]
    found = [walk.decode() for walk in walks if walk is not None]
    assert found, "no walk came to its end"
    return found


def takes(backend: Backend, kind: str, text: str, output: str) -> bool:
    it = start(backend, kind, text)
    return all(map(it.accept, output.encode())) and it.accept(EOS)


PATTERNS = [
    ".*",
    "[^a]+",
    r"\d+(\.\d+)?",
    "(ab+)*c",
    r"\S{2,5}",
    r'"[^"]*"',
    r"a\\b",
    r"[\n\t]x",
    "(é|日){2}",
    r"[^\d\s]{3}",
    r"\W\D",
    "a/b|5\\$",
    "a{0}",
    r"(x|\n)+",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_means_in_python_in_text_and_in_json(backend: Backend, pattern: str) -> None:
    found = texts(backend, "regex", pattern)
    assert all(re.fullmatch(pattern, text) for text in found), found
    found = texts(backend, "json_schema", json.dumps({"type": "string", "pattern": pattern}))
    assert all(re.fullmatch(pattern, json.loads(text)) for text in found), found
    keys = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    found = texts(backend, "json_schema", json.dumps(keys))
    assert all(re.fullmatch(pattern, key) for text in found for key in json.loads(text)), found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_structural_tags_pattern_is_the_same(backend: Backend, pattern: str) -> None:
    parts = [{"type": "const_string", "value": "<"}, {"type": "regex", "pattern": pattern}]
    tag = json.dumps({"format": {"type": "sequence", "elements": parts}})
    assert all(re.fullmatch(pattern, text[1:]) for text in texts(backend, "structural_tag", tag))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d+(\.\d+)?", ["1", "12.5"], ["1.", ".5", "1.2.3"]),
        (r"^https?://\S+", ["https://example.org/z"], ["http://", "see https://example.org"]),
        ("^a|b$", ["a", "ab", "xb", "ax", "b"], ["xa", "bx"]),
        (r"cost\$", ["cost$"], ["cost", "cost\\"]),
        (r'say "\w+"', ['say "hi"'], ["say hi"]),
        (r"C:\\\w+", ["C:\\x"], ["C:x"]),
        ("[a&&b]", ["a", "&", "b"], ["", "&&"]),
        ("a\nb", ["a\nb"], ["a b"]),
    ],
)
def test_texts_are_let_through_as_json_schema_has_patterns(
    backend: Backend, pattern: str, good: list[str], bad: list[str]
) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    for text in good:
        assert takes(backend, "json_schema", schema, json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        assert not takes(backend, "json_schema", schema, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "minLength": 3, "maxLength": 6},
        {"type": "string", "minLength": 2},
        {"type": "object", "additionalProperties": {"type": "string", "maxLength": 2}},
        {"type": "object", "properties": {"\U000f0000": {"type": "string", "pattern": "[a-c]{2}"}, "pattern": {}}},
    ],
    ids=str,
)
def test_strings_are_json_and_have_their_length(backend: Backend, schema: dict[str, Any]) -> None:
    for text in texts(backend, "json_schema", json.dumps(schema)):
        value = json.loads(text)
        for string in value.values() if isinstance(value, dict) else [value]:
            json.dumps(string, ensure_ascii=False).encode()  # no half of a surrogate pair
            bounds = schema.get("additionalProperties", schema)
            if isinstance(string, str):
                assert bounds.get("minLength", 0) <= len(string) <= bounds.get("maxLength", 10**6)


def test_half_a_surrogate_pair_is_no_text(backend: Backend) -> None:
    text = json.dumps({"type": "string"})
    assert takes(backend, "json_schema", text, '"é \U0001f600"')
    assert not takes(backend, "json_schema", text, '"\\ud83d"')


@pytest.mark.parametrize("schema", [{"type": "number"}, {}, {"type": "array", "items": {"type": "number"}}], ids=str)
def test_a_number_is_one_that_readers_can_hold(schema: dict[str, Any]) -> None:
    backend, text = load_backend("xgrammar", TABLE, True), json.dumps(schema)
    around = "[{}]" if schema.get("type") == "array" else "{}"
    for number in ("-1.5e+99", "1E9", "0.25", "-0"):
        assert takes(backend, "json_schema", text, around.format(number))
    assert not takes(backend, "json_schema", text, around.format("1e400"))


FORMATS = [
    ("date", ["2024-12-31", "2023-02-28"], ["2023-02-31", "2023-04-31", "2023-13-01"]),
    ("time", ["23:59:59Z", "10:00:00.5+02:00"], ["10:00:60Z", "24:00:00Z", "10:00:00"]),
    ("date-time", ["2024-01-31T23:59:59Z"], ["2024-01-31T23:59:60Z", "2024-01-31"]),
    ("ipv4", ["10.0.0.255"], ["10.0.0.256", "10.0.0.01"]),
    ("email", ["some.one+x@mail.example.org"], ["@x.y", f"{'a' * 65}@x.y", "a@-x.y"]),
    ("hostname", ["a-b.example.org"], ["-a.b", f"{'a' * 64}.b"]),
]


@pytest.mark.parametrize(("name", "good", "bad"), FORMATS)
def test_formats_let_their_own_through(backend: Backend, name: str, good: list[str], bad: list[str]) -> None:
    schema = json.dumps({"type": "string", "format": name})
    assert all(takes(backend, "json_schema", schema, json.dumps(text)) for text in good)
    assert not any(takes(backend, "json_schema", schema, json.dumps(text)) for text in bad)
