# SPDX-License-Identifier: MIT
"""Grammars by xgrammar: byte-level pushdown automata with token masks computed when compiled.

Its threads are the caller's only: the compiler service decides how many compile at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from tokenspeed.config.constraint import Constraint
from tokenspeed.config.schema.regex import Node, read_regex
from tokenspeed.grammar.backend import CompiledGrammar, GrammarError, Matcher, TokenTable, require_text
from tokenspeed.grammar.patterns import SchemaWriter, in_json, plain
from tokenspeed.grammar.productive import has_text

MAX_WHITESPACE = 16
"""Blanks in a row between two parts of a JSON text: room for indentation, and no endless run of them."""

_FIRST_MARK, _LAST_MARK = 0xF0000, 0x10FFFD
"""Characters for private use, which stand for patterns while the library turns a schema into a grammar."""
_MARK = re.compile(r'^(\S+) ::= \(\("\\U([0-9a-f]{8})"\)\)$', re.MULTILINE)
_QUOTED = re.compile(r'"\\"" (\S+) "\\""')

_HEX = "[A-Fa-f0-9]"
_NARROWED = {
    r"[^\0-\x1f\"\\\r\n": r"[^\0-\x1f\ud800-\udfff\"\\\r\n",
    f'("u" {_HEX} {_HEX} {_HEX} {_HEX})': f'("u" [A-CEFa-cef0-9] {_HEX} {_HEX} {_HEX}) | ("u" [Dd] [0-7] {_HEX} {_HEX})'
    rf' | ("u" [Dd] [89ABab] {_HEX} {_HEX} "\\u" [Dd] [C-Fc-f] {_HEX} {_HEX})',
    "[eE] basic_number_4 basic_number_digits{1, -1}": "[eE] basic_number_4 basic_number_digits{1, 2}",
}
"""Where the library's strings have halves of surrogate pairs, bare or escaped, ours have none; and exponents of any
length, which no reader's numbers hold, ours have two digits."""
_PLAIN = SchemaWriter(plain, measures=False)
_LOCATION = re.compile(r"^\[[0-9:]+\] [^ ]+:\d+: ")


class XGrammarBackend:
    """any_whitespace: whether JSON may have blanks between its parts."""

    def __init__(self, table: TokenTable, any_whitespace: bool) -> None:
        # A special token spells what no text is, so that only a format that names it lets it through.
        tokens = list(table.tokens)
        for text, token in table.special.items():
            tokens[token] = b"\xff" + text.encode()
        info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(table.tokens),
            stop_token_ids=list(table.eos),
        )
        # The service keeps what is compiled; a second cache in here would be without a bound.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._any_whitespace = any_whitespace
        self._special = table.special
        self._table = table

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            return require_text(_Compiled(self._compile(constraint)), self._table)
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(_sentence(str(error))) from None

    def _compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        text = constraint.text
        if constraint.kind == "json_schema":
            grammar = _json_grammar(json.loads(text), self._any_whitespace)
            return self._compiler.compile_grammar(grammar)
        if constraint.kind == "regex":
            return self._compiler.compile_regex(plain(read_regex(text, "#")))
        if constraint.kind == "ebnf":
            grammar = xgrammar.Grammar.from_ebnf(text)
            if not has_text(str(grammar)):
                raise GrammarError("no text satisfies it: a rule leads back to itself in every way")
            return self._compiler.compile_grammar(grammar)
        return self._compiler.compile_structural_tag(json.dumps(self._tagged(json.loads(text))))

    def _tagged(self, part: Any) -> Any:
        """The tag with blanks bounded, and with ends that are one special token named as tokens: the text of such a
        token is never in the mask."""
        if isinstance(part, list):
            return [self._tagged(item) for item in part]
        if not isinstance(part, dict):
            return part
        if part.get("type") == "json_schema":
            if part.keys() == {"type", "json_schema"}:
                return {"type": "grammar", "grammar": str(_json_grammar(part["json_schema"], True))}
            return {"max_whitespace_cnt": MAX_WHITESPACE, **part, "json_schema": _PLAIN.of(part["json_schema"])}
        if part.get("type") == "regex":
            return {**part, "pattern": plain(read_regex(part["pattern"], "#")) or "(?:)"}
        out = {key: self._tagged(value) for key, value in part.items()}
        if part.get("type") == "tag":
            for key in ("begin", "end"):
                token = self._special.get(part[key]) if isinstance(part.get(key), str) else None
                if token is not None:
                    out[key] = {"type": "token", "token": token}
        return out


def _json_grammar(schema: Any, any_whitespace: bool) -> xgrammar.Grammar:
    """The grammar of a normal schema, strings of a pattern or a length in our own words: the library bounds a length
    over raw control characters, which JSON has in no string."""
    taken = set(_dumped(schema))
    marks = (chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in taken)
    texts: dict[str, str] = {}

    def marked(node: Node) -> str:
        mark = next(marks)
        texts[mark] = in_json(node)
        return mark

    grammar = xgrammar.Grammar.from_json_schema(
        _dumped(SchemaWriter(marked, measures=True).of(schema)),
        any_whitespace=any_whitespace,
        separators=None if any_whitespace else (",", ":"),
        strict_mode=False,
        max_whitespace_cnt=MAX_WHITESPACE if any_whitespace else None,
    )
    text = str(grammar)
    for theirs, ours in _NARROWED.items():
        text = text.replace(theirs, ours)
    rules = {rule[1]: texts.get(chr(int(rule[2], 16))) for rule in _MARK.finditer(text)}

    def put(quoted: re.Match[str]) -> str:
        own = rules.get(quoted[1])
        return quoted[0] if own is None else f'"\\"" {own} "\\""'

    # Between its quotes rather than in a rule: what may follow is then known when the masks are made.
    return xgrammar.Grammar.from_ebnf(_QUOTED.sub(put, text))


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _Compiled:
    def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
        self._grammar = grammar
        self.num_bytes = int(grammar.memory_size_bytes)

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher:
        return _Matcher(
            xgrammar.GrammarMatcher(self._grammar, override_stop_tokens=sorted(set(stop_token_ids)) or None)
        )


class _Matcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def fill(self, row: NDArray[np.int32]) -> None:
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0)


def _sentence(text: str) -> str:
    """The library's message without the place in its source, on one line."""
    return " ".join(_LOCATION.sub("", text.strip()).split())[:500] or "the compiler gives no reason"
