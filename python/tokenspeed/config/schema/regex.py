# SPDX-License-Identifier: MIT
"""Regular expressions read into a tree, so that every grammar compiler gets them to mean the same.

What is read is what ECMAScript and Python agree on; where they differ (`.`, \\s, \\D, \\W), the characters that both
allow. Compilers match the whole text, so anchors are meaningful at its ends only; look-around and back-references are
no regular language. What is not supported is a `SchemaError` that names it, before any compiling. Characters are
Unicode scalar values: no text has a surrogate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from tokenspeed.config.schema.error import SchemaError

MAX_REGEX_CHARS = 16_384
MAX_REGEX_DEPTH = 100
_MAX_COUNT = 9_999_999

Ranges = tuple[tuple[int, int], ...]
"""Code points from and to, each inclusive; ascending, neither overlapping nor adjacent."""


@dataclass(frozen=True)
class Set:
    """One character out of these; out of none, no text at all."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    branches: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`part` at least `low` and at most `high` times; None is without end."""

    part: Node
    low: int
    high: int | None


Node = Set | Sequence | Choice | Repeat


def normal_ranges(ranges: list[tuple[int, int]]) -> Ranges:
    """The same characters, sorted and joined, without surrogates."""
    whole: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if whole and low <= whole[-1][1] + 1:
            whole[-1] = (whole[-1][0], max(whole[-1][1], high))
        else:
            whole.append((low, high))
    parts = [(max(low, a), min(high, b)) for low, high in whole for a, b in ((0, 0xD7FF), (0xE000, 0x10FFFF))]
    return tuple((low, high) for low, high in parts if low <= high)


def all_but(ranges: Ranges) -> Ranges:
    edges = [(-1, -1), *ranges, (0x110000, 0x110000)]
    return normal_ranges([(a + 1, b - 1) for (_, a), (b, _) in pairwise(edges) if a + 1 < b])


def _of(*ranges: str) -> Ranges:
    return normal_ranges([(ord(text[0]), ord(text[-1])) for text in ranges])


ANY = all_but(())
_DIGIT, _WORD, _BLANK = _of("09"), _of("09", "AZ", "az", "_"), _of("\t\r", " ")
_WIDE_BLANK = _of(
    "\x1c\x20", "\x85", "\xa0", "\u1680", "\u2000\u200a", "\u2028\u2029", "\u202f", "\u205f", "\u3000", "\ufeff"
)


@cache
def _class_of(letter: str) -> Ranges:
    """What \\d, \\w, \\s and their opposites stand for; the opposites without what one of the two has in the class."""
    if letter in "dws":
        return {"d": _DIGIT, "w": _WORD, "s": _BLANK}[letter]
    if letter == "S":
        return all_but(normal_ranges([*_BLANK, *_WIDE_BLANK]))
    below = map(chr, range(0x20000))  # every digit that there is
    if letter == "D":
        return all_but(normal_ranges([(ord(char), ord(char)) for char in below if char.isdecimal()]))
    words = [(ord(char), ord(char)) for char in below if char.isalnum() or char == "_"]
    return all_but(normal_ranges([*words, (0x20000, 0x10FFFF)]))


_DOT = all_but(_of("\n", "\r", "\u2028\u2029"))
_CLASSES = "dwsDWS"
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


def read_regex(pattern: str, path: str, is_search: bool = False, is_anywhere: bool = False) -> Node:
    """The tree of a pattern that matches a whole text. Raises `SchemaError` for what is no regular expression or not
    supported; `path` says where it stands. An anchor inside the pattern is refused: compilers would ignore it.

    is_search: an alternative with one anchor has any text at its other end, as JSON Schema has it. Without anchors it
    is the whole text, which is less than what JSON Schema lets through, and what people mean. is_anywhere: every end
    without an anchor has any text, which is all that JSON Schema lets through.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        raise SchemaError(path, f"the pattern has {len(pattern)} characters, at most {MAX_REGEX_CHARS}")
    return _Reader(pattern, path, is_search, is_anywhere).read()


def check_regex(pattern: str, path: str) -> None:
    """Raise what `read_regex` raises, and `SchemaError` where no text at all matches."""
    if is_never(read_regex(pattern, path)):
        raise SchemaError(path, f"pattern {pattern[:80]!r}: no text satisfies it")


def is_never(node: Node) -> bool:
    """Whether no text matches."""
    if isinstance(node, Set):
        return not node.ranges
    if isinstance(node, Sequence):
        return any(map(is_never, node.parts))
    if isinstance(node, Choice):
        return all(map(is_never, node.branches))
    return node.low > 0 and is_never(node.part)


def _repeated(part: Node, low: int, high: int | None) -> Node:
    """`part` so many times, two counts as one where they are: the library's parsers take a count of counts in every
    way that it can be split."""
    if not isinstance(part, Repeat) or part.low > 1:
        return Repeat(part, low, high)
    most = None if high is None or part.high is None else part.high * high
    if high == 0 or part.high == 0:
        most = 0
    return (
        Repeat(part, low, high) if most is not None and most > _MAX_COUNT else Repeat(part.part, part.low * low, most)
    )


class _Reader:
    def __init__(self, pattern: str, path: str, is_search: bool, is_anywhere: bool) -> None:
        self.pattern = pattern
        self.path = path
        self.is_search = is_search
        self.is_anywhere = is_anywhere
        self.at = 0
        self.depth = 0

    def read(self) -> Node:
        whole = self._choice()
        if self.at < len(self.pattern):
            raise self._error("a group is closed that was not opened")
        return whole

    def _error(self, what: str) -> SchemaError:
        return SchemaError(self.path, f"pattern {self.pattern[:80]!r}: {what}")

    def _peek(self, count: int = 1) -> str:
        return self.pattern[self.at : self.at + count]

    def _takes(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _choice(self) -> Node:
        branches = [self._sequence()]
        while self._takes("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        begins = not self.depth and self._takes("^")
        ends = False
        while self._peek() not in ("", "|", ")"):
            if self._peek() in "^$":
                if self.depth or self._peek() == "^" or self._peek(2) not in ("$", "$|"):
                    raise self._error(f"the anchor {self._peek()} is supported at the ends of a pattern only")
                ends = self._takes("$")
                break
            parts.append(self._quantified(self._atom()))
        if not self.depth and (self.is_anywhere or (self.is_search and begins != ends)):
            free = Repeat(Set(ANY), 0, None)
            parts = [*([] if begins else [free]), *parts, *([] if ends else [free])]
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _atom(self) -> Node:
        char = self._peek()
        self.at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return Set(self._class())
        if char == "\\":
            return Set(self._escape())
        if char in "*+?":
            raise self._error(f"nothing to repeat before {char!r}")
        if char == "{":
            self.at -= 1
            self._count()
            raise self._error("nothing to repeat before a count")
        return Set(_DOT if char == "." else normal_ranges([(ord(char), ord(char))]))

    def _group(self) -> Node:
        self.depth += 1
        if self.depth > MAX_REGEX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_REGEX_DEPTH} deep")
        if any(self.pattern.startswith(mark, self.at) for mark in ("?=", "?!", "?<=", "?<!")):
            raise self._error("look-around is not supported")
        if not self._takes("?:") and self._peek() == "?":
            raise self._error("only (?: ) groups and plain groups are supported")
        inner = self._choice()
        if not self._takes(")"):
            raise self._error("a group is not closed")
        self.depth -= 1
        return inner

    def _quantified(self, part: Node) -> Node:
        char = self._peek()
        if not char or char not in "*+?{":
            return part
        low, high = (0, None) if char == "*" else (1, None) if char == "+" else (0, 1)
        if char == "{":
            low, high = self._count()
        else:
            self.at += 1
        self._takes("?")  # lazy or not, the same texts match
        if self._peek() and self._peek() in "*+?":
            raise self._error(f"nothing to repeat before {self._peek()!r}")
        return _repeated(part, low, high)

    def _count(self) -> tuple[int, int | None]:
        """{n}, {n,} or {n,m}."""
        body, closed, _ = self.pattern[self.at + 1 :].partition("}")
        low, comma, high = body.partition(",")
        digits = low.isascii() and low.isdecimal() and (not high or (high.isascii() and high.isdecimal()))
        if not closed or not digits:
            raise self._error("a brace that counts nothing must be escaped")
        if comma and high and int(high) < int(low):
            raise self._error(f"the count {{{body}}} ends before it begins")
        if max(len(low), len(high)) > len(str(_MAX_COUNT)):
            raise self._error(f"the count {{{body}}} is too large")
        self.at += len(body) + 2
        return int(low), (int(high) if high else None) if comma else int(low)

    def _class(self) -> Ranges:
        """A class of characters, behind its bracket."""
        inverted = self._takes("^")
        if self._peek() == "]":
            raise self._error("a class that begins with ] is read in two ways; write \\]")
        found: list[tuple[int, int]] = []
        while not self._takes("]"):
            if self._peek(2) in ("[:", "[.", "[="):
                raise self._error("POSIX classes are not supported; where [ is itself, write \\[")
            low = self._member(inverted)
            if self._peek() == "-" and self._peek(2) not in ("-", "-]") and len(low) == 1 and low[0][0] == low[0][1]:
                self.at += 1
                high = self._member(inverted)
                if len(high) != 1 or high[0][0] != high[0][1]:
                    raise self._error("a range of a class ends in a class")
                if high[0][0] < low[0][0]:
                    raise self._error("a range of a class ends before it begins")
                found.append((low[0][0], high[0][0]))
            else:
                found += low
        ranges = normal_ranges(found)
        return all_but(ranges) if inverted else ranges

    def _member(self, inverted: bool) -> list[tuple[int, int]]:
        char = self._peek()
        if not char:
            raise self._error("a character class is not closed")
        self.at += 1
        if char == "\\":
            if inverted and self._peek() in tuple(_CLASSES) and self._takes(self._peek()):
                return list(all_but(_class_of(self.pattern[self.at - 1].swapcase())))
            return [(8, 8)] if self._takes("b") else list(self._escape())
        return [(ord(char), ord(char))]

    def _escape(self) -> Ranges:
        """What an escape stands for, behind its backslash."""
        char = self._peek()
        self.at += 1
        if not char:
            raise self._error("it ends in a backslash")
        if char in tuple(_CLASSES):
            return _class_of(char)
        if char in _CONTROLS:
            return ((_CONTROLS[char], _CONTROLS[char]),)
        if char in "xu":
            return self._code(char)
        if char == "0" and not self._peek().isdecimal():
            return ((0, 0),)
        if char == "c" and self._peek().isascii() and self._peek().isalpha():
            self.at += 1
            code = ord(self.pattern[self.at - 1]) % 32
            return ((code, code),)
        if char in "123456789k":
            raise self._error("back-references are not supported")
        if char in "bBAZzG":
            raise self._error(f"the anchor \\{char} is not supported")
        if char in "pP":
            raise self._error("Unicode properties are not supported")
        if char.isalnum():
            raise self._error(f"the escape \\{char} is not supported")
        return normal_ranges([(ord(char), ord(char))])

    def _code(self, kind: str) -> Ranges:
        """\\xHH, \\uHHHH, \\u{H...}; two \\u that are a pair of surrogates are one character."""
        code = self._hex(kind)
        if 0xD800 <= code < 0xDC00 and self.pattern.startswith("\\u", self.at):
            self.at += 2
            low = self._hex("u")
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else low
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self._error(f"no character has the code {code:#x}")
        return ((code, code),)

    def _hex(self, kind: str) -> int:
        if kind == "u" and self._takes("{"):
            digits, closed, _ = self.pattern[self.at :].partition("}")
            width = len(digits) + 1 if closed and len(digits) <= 8 else 0
        else:
            digits = self._peek(2 if kind == "x" else 4)
            width = len(digits) if len(digits) == (2 if kind == "x" else 4) else 0
        if not width or not all(digit in "0123456789abcdefABCDEF" for digit in digits) or not digits:
            raise self._error(f"\\{kind} is followed by the code of a character, in hexadecimal")
        self.at += width
        return int(digits, 16)
