# SPDX-License-Identifier: MIT
"""Grammars by llguidance: regular-expression derivatives and an Earley parser, masks computed step by step.

EBNF is what llama.cpp calls GBNF and is translated to the library's Lark dialect, as structural tags are where they
are sequences, choices, tags, schemas, patterns and texts; others are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from tokenspeed.config.constraint import Constraint
from tokenspeed.config.schema.regex import Node, read_regex
from tokenspeed.grammar.backend import CompiledGrammar, GrammarError, Matcher, TokenTable, require_text
from tokenspeed.grammar.patterns import SchemaWriter, plain

_BLANKS = r"\x20{1,2}|\x20{0,2}\x0A[\x20\x09]{0,16}"
"""A blank or two, or a new line with its indentation."""
_LONGEST = 16
"""Bytes of the longest token that forced text is cut into."""
_ROUGH_BYTES = 1 << 20
"""The library does not tell how much memory a grammar takes."""


class LLGuidanceBackend:
    """any_whitespace: whether JSON may have blanks between its parts."""

    def __init__(self, table: TokenTable, any_whitespace: bool) -> None:
        self._options: dict[str, Any] = (
            {"whitespace_flexible": True, "whitespace_pattern": _BLANKS}
            if any_whitespace
            else {"whitespace_flexible": False}
        )
        self._special = table.special
        self._table = table
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(table)), n_vocab=len(table.tokens), eos_token=list(table.eos)
        )

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            grammar = self._grammar(constraint)
        except GrammarError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise GrammarError(" ".join(str(error).split())[:500]) from None
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(" ".join(matcher.get_error().split())[:500])
        return require_text(_Compiled(matcher), self._table)

    def _grammar(self, constraint: Constraint) -> str:
        text = constraint.text
        if constraint.kind == "json_schema":
            return str(
                llguidance.LLMatcher.grammar_from_json_schema(
                    json.dumps(_SCHEMAS.of(json.loads(text))), overrides=self._options
                )
            )
        if constraint.kind == "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(_whole(text)))
        if constraint.kind == "ebnf":
            return str(llguidance.LLMatcher.grammar_from_lark(_lark(text)))
        lark = _TagWriter(self._special, self._options).write(json.loads(text)["format"])
        return str(llguidance.LLMatcher.grammar_from_lark(lark))


def _lark(text: str) -> str:
    try:
        return str(any_to_lark(text))
    except Exception as error:  # noqa: BLE001  (the translator raises nothing finer)
        raise GrammarError(" ".join(str(error).split())[:500]) from None


def _whole(pattern: str) -> str:
    """The pattern without its anchors: the library always matches the whole text."""
    return plain(read_regex(pattern, "#"))


def _anchored(node: Node) -> str:
    """As schemas have patterns, which may stand anywhere in a text unless they are anchored."""
    return f"^(?:{plain(node)})$"


_SCHEMAS = SchemaWriter(_anchored, measures=False)


class _Tokens:
    """The table as the library wants it: every token has bytes, special ones such as no text has."""

    def __init__(self, table: TokenTable) -> None:
        names = {token: text for text, token in table.special.items()}
        self.tokens = [
            data or b"\xff" + names.get(token, f"<unused {token}>").encode() for token, data in enumerate(table.tokens)
        ]
        self.special_token_ids = [token for token, data in enumerate(table.tokens) if not data]
        self.eos_token_id = table.eos[0]
        self.bos_token_id = None
        self._ids = {data: token for token, data in reversed(list(enumerate(table.tokens))) if data}

    def __call__(self, data: bytes) -> list[int]:
        """How text that must come is cut: the longest token first, and never a special one, whatever is spelt."""
        ids, at = [], 0
        while at < len(data):
            piece = next((data[at : at + n] for n in range(_LONGEST, 0, -1) if data[at : at + n] in self._ids), None)
            if piece is not None:
                ids.append(self._ids[piece])
            at += len(piece or b"?")
        return ids


class _Compiled:
    num_bytes = _ROUGH_BYTES

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher:
        return _Matcher(self._matcher.deep_copy(), frozenset(stop_token_ids))


class _Matcher:
    """Stop tokens are ours: the library knows the tokenizer's only, and not the request's."""

    def __init__(self, matcher: llguidance.LLMatcher, stops: frozenset[int]) -> None:
        self._matcher = matcher
        self._stops = stops
        self.is_terminated = False

    def accept(self, token_id: int) -> bool:
        if token_id in self._stops:
            self.is_terminated = self._matcher.is_accepting()
            return self.is_terminated
        return bool(self._matcher.try_consume_tokens([token_id]))

    def fill(self, row: NDArray[np.int32]) -> None:
        if self._matcher.is_stopped():
            row[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        words = row.view(np.uint32)
        complete = self._matcher.is_accepting()
        for stop in self._stops:
            bit = np.uint32(1 << (stop % 32))
            words[stop // 32] = words[stop // 32] | bit if complete else words[stop // 32] & ~bit


class _TagWriter:
    """A structural tag's format as a Lark grammar, a rule a part."""

    def __init__(self, special: Any, json_options: dict[str, Any]) -> None:
        self._special = special
        self._json_options = json_options
        self._rules: list[str] = []
        self._writers: dict[str, Callable[[Any], str]] = {
            "const_string": lambda part: _quoted(part["value"]),
            "json_schema": self._json,
            "regex": lambda part: self._rule(_slashed(part["pattern"])),
            "any_text": lambda part: self._rule("/(.|\\n)*/"),
            "sequence": lambda part: self._rule(" ".join(map(self._part, part["elements"])) or '""'),
            "or": lambda part: self._rule(" | ".join(map(self._part, part["elements"]))),
            "tag": self._tag,
        }

    def write(self, tag_format: Any) -> str:
        start = self._part(tag_format)
        return "\n".join([f"start: {start}", *self._rules])

    def _part(self, part: Any) -> str:
        writer = self._writers.get(part["type"])
        if writer is None:
            raise ValueError(f"the format {part['type']!r} is not supported by llguidance here; use xgrammar")
        return writer(part)

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _json(self, part: Any) -> str:
        if part.get("style", "json") != "json":
            raise ValueError(f"the style {part['style']!r} is not supported by llguidance here; use xgrammar")
        schema = {**_SCHEMAS.of(part["json_schema"]), "x-guidance": self._json_options}
        return self._rule(f"%json {json.dumps(schema)}")

    def _tag(self, part: Any) -> str:
        ends = part["end"] if isinstance(part["end"], list) else [part["end"]]
        begin = self._marker(part["begin"])
        if part["content"]["type"] == "any_text":
            if len(ends) == 1 and isinstance(ends[0], str) and ends[0] not in self._special:
                free = self._free(ends[0])
                return self._rule(f"{begin} {free}")
            free = self._rule("/(.|\\n)*/")
            return self._rule(f"{begin} {free} ({' | '.join(map(self._marker, ends))})")
        return self._rule(f"{begin} {self._part(part['content'])} ({' | '.join(map(self._marker, ends))})")

    def _free(self, end: str) -> str:
        """Text up to and with the first appearance of `end`."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(.|\\n)*{_escaped(end)}/")
        return name

    def _marker(self, marker: Any) -> str:
        if isinstance(marker, dict):
            return f"<[{int(marker['token'])}]>"
        return f"<[{self._special[marker]}]>" if marker in self._special else _quoted(marker)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if not char.isalnum() and char not in "<> _\n" else char for char in text)


def _slashed(pattern: str) -> str:
    return f"/{_whole(pattern)}/"
