# SPDX-License-Identifier: MIT
"""Stop strings as a pure machine: the same text out, whatever the cuts of the text in.

The stop string that is complete first wins; of several that are complete at the same character, the longest. Text
that could still become a stop string is held back, so nothing of a stop string is ever given out, and the text ends
right before it. One `StopMatcher` a choice; it never sees tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feeds text through until one of `stops` (non-empty strings) is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that may be given out now, the stop string just completed or None). After a match: ("", None)."""
        if self.matched is not None:
            return "", None
        if not self._stops:
            return text, None
        buffer = self._held + text
        _, start, matched = min(self._occurrences(buffer), default=(0, 0, None))
        if matched is not None:
            self.matched, self._held = matched, ""
            return buffer[:start], matched
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], None

    def close(self) -> str:
        """The text that was held back, now that no more comes."""
        held, self._held = self._held, ""
        return held

    def _occurrences(self, buffer: str) -> list[tuple[int, int, str]]:
        found = ((buffer.find(stop), stop) for stop in self._stops)
        return [(start + len(stop), start, stop) for start, stop in found if start >= 0]

    def _possible_start(self, buffer: str) -> int:
        """Where the longest end of `buffer` begins that a stop string could begin with."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            tail = buffer[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)
