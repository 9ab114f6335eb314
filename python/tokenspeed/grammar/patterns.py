# SPDX-License-Identifier: MIT
"""Regular expressions and strings of schemas as compilers are to have them.

`plain` writes what `config.schema.regex` read with nothing in it that two libraries could take differently: groups,
counts, and classes of single characters. `in_json` is for xgrammar, whose own patterns in JSON match the text as it is
(a quote or a line break would break the JSON), take overlong UTF-8, and lose the beginning of `(a[0-9]+)?`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenspeed.config.schema.regex import (
    ANY,
    Choice,
    Node,
    Ranges,
    Repeat,
    Sequence,
    Set,
    all_but,
    is_never,
    normal_ranges,
    read_regex,
)

_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\"}
_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
_PLAIN_JSON = all_but(_ESCAPED)

_DAY = (
    r"\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_HOUR = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_HOUR}:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+-]{_HOUR})"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,14}[A-Za-z0-9])?"
_NAME = rf"{_LABEL}(?:\.{_LABEL}){{0,6}}"
_BYTE = r"(?:\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])"
_MAILBOX = "[A-Za-z0-9_+-]{1,20}"
FORMATS = {
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "hostname": _NAME,
    "email": rf"{_MAILBOX}(?:\.{_MAILBOX}){{0,2}}@{_NAME}",
}
"""Formats whose grammars in the libraries let through what is none: a 31st of February, the second 60, labels beyond
their length, bytes that begin with 0. The 29th of February is left out, and so are quoted mailboxes."""


def plain(node: Node) -> str:
    """A regular expression. Atoms are groups or classes, so that whatever follows applies to all of them."""
    if isinstance(node, Set):
        return _plain_set(node.ranges)
    if isinstance(node, Sequence):
        return "".join(map(plain, node.parts))
    if isinstance(node, Choice):
        branches = [plain(branch) for branch in node.branches if not is_never(branch)]
        return f"(?:{'|'.join(dict.fromkeys(branches))})"
    inner = "" if is_never(node.part) or node.high == 0 else plain(node.part)
    atom = inner if not inner or isinstance(node.part, Set | Choice) else f"(?:{inner})"
    return atom and atom + _count(node.low, node.high)


def in_json(node: Node) -> str:
    """An expression in xgrammar's EBNF for a JSON text between its quotes. Characters that must be escaped are left out
    where that leaves any text: a repeated choice of characters and escapes takes 50 ms a token."""
    narrow = _limited(node)
    return _expression(node if is_never(narrow) else narrow)


def _limited(node: Node) -> Node:
    if isinstance(node, Set):
        return Set(_both(node.ranges, _PLAIN_JSON))
    if isinstance(node, Sequence):
        return Sequence(tuple(map(_limited, node.parts)))
    if isinstance(node, Choice):
        return Choice(tuple(map(_limited, node.branches)))
    return Repeat(_limited(node.part), node.low, node.high)


def _expression(node: Node) -> str:
    if isinstance(node, Set):
        return _json_set(node.ranges)
    if isinstance(node, Sequence):
        return " ".join(map(_expression, node.parts)) or '""'
    if isinstance(node, Choice):
        branches = [_expression(branch) for branch in node.branches if not is_never(branch)]
        return f"({' | '.join(dict.fromkeys(branches))})"
    if is_never(node.part) or node.high == 0:
        return '""'
    inner = _expression(node.part)
    return (inner if isinstance(node.part, Set | Choice) else f"({inner})") + _count(node.low, node.high)


def _json_set(ranges: Ranges) -> str:
    """A class, inverted where it holds most characters, which the library is quick at; and escapes."""
    shown = _both(ranges, _PLAIN_JSON)
    branches = []
    if shown and shown[-1][1] == _LAST:
        branches.append(f"[^{_members((*all_but(shown), _SURROGATES))}]")
    elif shown:
        branches.append(f"[{_members(shown)}]")
    for low, high in _both(ranges, _ESCAPED):
        for code in range(low, high + 1):
            short = _SHORT.get(code)
            branches.append(f'"\\\\{_code(ord(short))}"' if short else f'"\\\\u{code:04x}"')
    return branches[0] if len(branches) == 1 else f"({' | '.join(branches)})"


def _members(ranges: Ranges) -> str:
    return "".join(_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges)


def _code(code: int) -> str:
    return f"\\U{code:08x}"


def _both(a: Ranges, b: Ranges) -> Ranges:
    return normal_ranges([(max(x, u), min(y, v)) for x, y in a for u, v in b if max(x, u) <= min(y, v)])


class SchemaWriter:
    """Schemas in normal form with their patterns and some formats written by `write`. A pattern is of the whole text.

    measures: whether lengths become patterns too.
    """

    def __init__(self, write: Callable[[Node], str], measures: bool) -> None:
        self._write = write
        self._measures = measures

    def of(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.of(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        node = self._text(schema)
        if node is not None:
            return {"type": "string", "pattern": self._write(node)}
        return {key: self._keyword(key, value) for key, value in schema.items()}

    def _text(self, schema: dict[str, Any]) -> Node | None:
        """What a string is, if a pattern is to say it."""
        if schema.get("type") != "string":
            return None
        if "pattern" in schema:
            return read_regex(schema["pattern"], "#", is_search=True)
        if schema.get("format") in FORMATS:
            return read_regex(FORMATS[schema["format"]], "#")
        if self._measures and ("minLength" in schema or "maxLength" in schema):
            return Repeat(Set(ANY), schema.get("minLength", 0), schema.get("maxLength"))
        return None

    def _keyword(self, key: str, value: Any) -> Any:
        if key in ("enum", "required"):
            return value
        if key in ("properties", "$defs"):
            return {name: self.of(inner) for name, inner in value.items()}
        if key == "patternProperties":
            return {self._write(read_regex(name, "#", is_search=True)): self.of(inner) for name, inner in value.items()}
        return self.of(value)


def _count(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _plain_set(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    return "[" + "".join(_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in ranges) + "]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:x}}}"
