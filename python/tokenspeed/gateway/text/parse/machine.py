# SPDX-License-Identifier: MIT
"""The core of every machine here: a buffer, a state, and markers that may be cut anywhere.

A state is a method that takes what it can from the buffer and returns whether to go on (after a change of state) or to
wait for more text. Nothing that could still become a marker is given out before it is refuted; `close` refutes all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tokenspeed.gateway.text.parse.events import Event, Text


class Markers:
    """A few fixed strings to look for; of several that begin at one place the longest counts."""

    def __init__(self, markers: Sequence[str]) -> None:
        ordered = sorted(markers, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, ordered))).search
        self._prefixes = frozenset(marker[:k] for marker in markers for k in range(1, len(marker)))
        self._longest = max(map(len, markers))
        self._firsts = {marker[0] for marker in markers}

    def split(self, buffer: str, final: bool) -> tuple[str, str | None, str]:
        """(text before, the first complete marker or None, what is left in the buffer)."""
        found = self._find(buffer)
        # A longer marker may still be coming where a shorter one stands at the buffer's end.
        if found and (final or buffer[found.start() :] not in self._prefixes):
            return buffer[: found.start()], found.group(), buffer[found.end() :]
        keep = len(buffer) if final else self._possible_start(buffer)
        return buffer[:keep], None, buffer[keep:]

    def _possible_start(self, buffer: str) -> int:
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._firsts and buffer[start:] in self._prefixes:
                return start
        return len(buffer)


class Machine:
    """Feeds text to states. Subclasses set `_state` and append to `_out`."""

    def __init__(self) -> None:
        self._buffer = ""
        self._final = False
        self._out: list[Event] = []
        self._state: Callable[[], bool] = self._content
        self._space = ""

    @property
    def thinking(self) -> bool:
        """The text that comes next is reasoning."""
        return False

    def feed(self, text: str) -> list[Event]:
        """Events that this text makes certain."""
        self._buffer += text
        return self._run()

    def close(self) -> list[Event]:
        """The last events, now that no more text comes."""
        self._final = True
        return self._run()

    def _run(self) -> list[Event]:
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    def _content(self) -> bool:
        """The first state. A subclass finds its markers here."""
        raise NotImplementedError

    def _until(self, markers: Markers) -> tuple[str, str | None]:
        """Take the text before the first of `markers`, and the marker itself when it is complete."""
        text, marker, self._buffer = markers.split(self._buffer, self._final)
        return text, marker

    def _give_text(self, text: str) -> None:
        """Content, but for white space at its end: what stands before a tool call is not the user's."""
        whole = self._space + text
        solid = whole.rstrip()
        self._space = whole[len(solid) :]
        if solid:
            self._out.append(Text(solid))

    def _flush_space(self) -> None:
        """White space at the end of an answer without calls is content after all."""
        if self._space:
            self._out.append(Text(self._space))
            self._space = ""
