# SPDX-License-Identifier: MIT
"""Whether a pattern matches a value of an enum, in bounded time: both are a client's, and a library that backtracks can
be kept busy for hours by a short pair of them."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from tokenspeed.config.schema.error import SchemaError
from tokenspeed.config.schema.regex import Choice, Node, Sequence, Set, read_regex

_MAX_STEPS = 200_000


def found_in(pattern: str, text: str) -> bool:
    """Whether the pattern matches somewhere in the text, as JSON Schema has it. Raises `SchemaError` where that takes
    too many steps. pattern: one that `check_regex` lets through."""
    ends = _Walk(pattern, text).ends(_read(pattern), frozenset((0,)))
    return len(text) in ends


@lru_cache(64)
def _read(pattern: str) -> Node:
    return read_regex(pattern, "#", is_anywhere=True)


class _Walk:
    """Sets of places in the text, moved through the tree."""

    def __init__(self, pattern: str, text: str) -> None:
        self._pattern = pattern
        self._codes = list(map(ord, text))
        self._left = _MAX_STEPS

    def ends(self, node: Node, starts: frozenset[int]) -> frozenset[int]:
        """Where matches of `node` end that begin at `starts`."""
        self._left -= 1 + len(starts)
        if self._left < 0:
            raise SchemaError("#", f"pattern {self._pattern[:80]!r} beside 'enum' or 'const' takes too long to compare")
        if isinstance(node, Set):
            return frozenset(at + 1 for at in starts if at < len(self._codes) and _holds(node, self._codes[at]))
        if isinstance(node, Sequence):
            for part in node.parts:
                starts = self.ends(part, starts) if starts else starts
            return starts
        if isinstance(node, Choice):
            return frozenset().union(*(self.ends(branch, starts) for branch in node.branches))
        # Places either run out or, where nothing is a match too, come to rest: no count is walked to its end.
        here = starts
        for _ in range(node.low):
            after = self.ends(node.part, here)
            if after == here or not after:
                here = after
                break
            here = after
        found, count = set(here), node.low
        while here and (node.high is None or count < node.high):
            here = self.ends(node.part, here) - found
            found |= here
            count += 1
        return frozenset(found)


def _holds(node: Set, code: int) -> bool:
    at = bisect_right(node.ranges, (code, 0x110000)) - 1
    return at >= 0 and code <= node.ranges[at][1]
