# SPDX-License-Identifier: MIT
"""What of regular expressions the grammar compilers take: a scan that names what they do not, before any compiling.

Compilers match the whole text, so anchors are meaningful at its ends only; look-around and back-references are no
regular language. A compiler may still refuse what passes here; it says so itself.
"""

from __future__ import annotations

from tokenspeed.config.schema.error import SchemaError

MAX_REGEX_CHARS = 16_384
MAX_REGEX_DEPTH = 100


def check_regex(pattern: str, path: str) -> None:
    """Raise `SchemaError` for what is no regular expression or not supported. `path` says where it stands.

    An anchor inside the pattern is refused: compilers would ignore it.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        raise SchemaError(path, f"the pattern has {len(pattern)} characters, at most {MAX_REGEX_CHARS}")
    _Scan(pattern, path).run()


class _Scan:
    def __init__(self, pattern: str, path: str) -> None:
        self.pattern = pattern
        self.path = path
        self.at = 0
        self.depth = 0
        self.repeatable = False
        """Whether a quantifier may follow."""

    def run(self) -> None:
        while self.at < len(self.pattern):
            self._step(self.pattern[self.at])
        if self.depth:
            raise self._error("a group is not closed")

    def _error(self, what: str) -> SchemaError:
        return SchemaError(self.path, f"pattern {self.pattern[:80]!r}: {what}")

    def _step(self, char: str) -> None:
        rest = self.pattern[self.at :]
        if char == "\\":
            self._escape()
        elif char == "[":
            self._class()
        elif char == "(":
            self._open(rest)
        elif char == ")":
            self.depth -= 1
            if self.depth < 0:
                raise self._error("a group is closed that was not opened")
            self._next(1, True)
        elif char in "*+?":
            if not self.repeatable:
                raise self._error(f"nothing to repeat before {char!r}")
            self._quantified(1)
        elif char == "{":
            self._count(rest)
        elif char in "^$":
            self._anchor(char)
        else:
            self._next(1, char != "|")

    def _next(self, count: int, repeatable: bool) -> None:
        self.at += count
        self.repeatable = repeatable

    def _quantified(self, count: int) -> None:
        """Past a quantifier and the mark that makes it lazy."""
        self._next(count, False)
        if self.pattern[self.at : self.at + 1] == "?":
            self.at += 1

    def _escape(self) -> None:
        following = self.pattern[self.at + 1 : self.at + 2]
        if not following:
            raise self._error("it ends in a backslash")
        if following in "123456789k":
            raise self._error("back-references are not supported")
        if following in "bBAZzG":
            raise self._error(f"the anchor \\{following} is not supported")
        if following in "pP":
            raise self._error("Unicode properties are not supported")
        self._next(2, True)

    def _class(self) -> None:
        end = self.at + 1
        if self.pattern[end : end + 1] == "^":
            end += 1
        while end < len(self.pattern) and self.pattern[end] != "]":
            end += 2 if self.pattern[end] == "\\" else 1
        if end >= len(self.pattern):
            raise self._error("a character class is not closed")
        self._next(end + 1 - self.at, True)

    def _open(self, rest: str) -> None:
        self.depth += 1
        if self.depth > MAX_REGEX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_REGEX_DEPTH} deep")
        if rest.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            raise self._error("look-around is not supported")
        if rest.startswith("(?:"):
            self._next(3, False)
        elif rest.startswith("(?"):
            raise self._error("only (?: ) groups and plain groups are supported")
        else:
            self._next(1, False)

    def _count(self, rest: str) -> None:
        """{n}, {n,} or {n,m}."""
        body, closed, _ = rest[1:].partition("}")
        low, comma, high = body.partition(",")
        if not closed or not low.isdecimal() or not (high.isdecimal() or not high):
            raise self._error("a brace that counts nothing must be escaped")
        if not self.repeatable:
            raise self._error("nothing to repeat before a count")
        if comma and high and int(high) < int(low):
            raise self._error(f"the count {{{body}}} ends before it begins")
        if max(len(low), len(high)) > 7:
            raise self._error(f"the count {{{body}}} is too large")
        self._quantified(len(body) + 2)

    def _anchor(self, char: str) -> None:
        """At the ends of the pattern, or of one of its alternatives, and nowhere else."""
        before, after = self.pattern[: self.at], self.pattern[self.at + 1 :]
        at_end = (not before or before.endswith("|")) if char == "^" else (not after or after.startswith("|"))
        if not at_end or self.depth:
            raise self._error(f"the anchor {char} is supported at the ends of a pattern only")
        self._next(1, False)
