# SPDX-License-Identifier: MIT
"""One JSON value, found in text that comes in pieces: where it ends, and whether it can be JSON at all.

Strings, escapes and brackets are followed exactly, numbers and words only as far as needed to see their end. Control
characters inside strings, which models write though JSON forbids it, are escaped on the way.
"""

from __future__ import annotations

import json
import re

_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w,:.+\-"{}\[\]]')
_SCALAR_END = re.compile(r"[^\w.+\-]")
_CLOSES = {"}": "{", "]": "["}


class JsonValue:
    """Takes text until its value is complete. A scalar's end is seen only by what follows it."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self.first = ""
        """The value's first character."""
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> tuple[int, str]:
        """(how many characters of `text` are the value's, those characters as JSON)."""
        i, out = 0, []
        while i < len(text) and not (self.done or self.failed):
            i, piece = self._string(text, i) if self._in_string else self._plain(text, i)
            out.append(piece)
        return i, "".join(out)

    def _string(self, text: str, i: int) -> tuple[int, str]:
        if self._escaped:
            self._escaped = False
            return i + 1, text[i]
        found = _IN_STRING.search(text, i)
        if not found:
            return len(text), text[i:]
        end, what = found.start(), found.group()
        if what == '"':
            self._in_string = False
            self.done = not self._open
        elif what == "\\":
            self._escaped = True
        else:
            return end + 1, text[i:end] + json.dumps(what)[1:-1]
        return end + 1, text[i : end + 1]

    def _plain(self, text: str, i: int) -> tuple[int, str]:
        if not self.first:
            self.first = text[i]
            self.failed = self.first not in '"{[' and _SCALAR_END.match(self.first) is not None
            if self.failed:
                return i, ""
        if not self._open and self.first not in '"{[':
            return self._scalar(text, i)
        found = _OUTSIDE.search(text, i)
        if not found:
            return len(text), text[i:]
        end, what = found.start(), found.group()
        if what == '"':
            self._in_string = True
        elif what in "{[":
            self._open.append(what)
        elif self._open and _CLOSES.get(what) == self._open[-1]:
            self._open.pop()
            self.done = not self._open
        else:
            self.failed = True
            return end, text[i:end]
        return end + 1, text[i : end + 1]

    def _scalar(self, text: str, i: int) -> tuple[int, str]:
        found = _SCALAR_END.search(text, i)
        self.done = found is not None
        end = found.start() if found else len(text)
        return end, text[i:end]
