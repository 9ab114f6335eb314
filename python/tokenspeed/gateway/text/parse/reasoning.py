# SPDX-License-Identifier: MIT
"""Reasoning between two markers, cut from the front of an answer.

The machine starts from the rendered prompt's state: a template that already opened the think block leaves an answer
that begins inside it. Only the first block of an answer counts, so that text about markers is not taken for them. White
space next to the markers belongs to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.gateway.text.parse.events import Event, Text, Thought
from tokenspeed.gateway.text.parse.machine import Machine, Markers


@dataclass(frozen=True)
class ReasoningFormat:
    """opens: a model that always begins inside the block, though neither prompt nor answer shows its marker. also_ends:
    markers that end the reasoning too and are not part of it, such as the begin of tool calls."""

    open: str
    close: str
    opens: bool
    also_ends: tuple[str, ...]

    def starts_open(self, prompt: str, continued: str | None) -> bool:
        """prompt: the rendered prompt's end. continued: the message that the answer goes on with, if it does."""
        if continued is not None:
            return continued.rfind(self.open) > continued.rfind(self.close)
        end = prompt.rstrip()
        return end.endswith(self.open) or (self.opens and not end.endswith(self.close))


class ReasoningSplitter(Machine):
    """Gives `Thought` for the reasoning and `Text` for all after it."""

    def __init__(self, form: ReasoningFormat, starts_open: bool) -> None:
        super().__init__()
        self._form = form
        self._ends = Markers((form.close, *form.also_ends))
        self._starts_open = starts_open
        self._state = self._beginning

    @property
    def thinking(self) -> bool:
        """Inside the block."""
        return self._state in (self._thinking, self._skip_space) or (
            self._state == self._beginning and self._starts_open
        )

    def feed(self, text: str) -> list[Event]:
        """As `Machine.feed`; after the block, text goes through untouched."""
        if self._state == self._content and not self._buffer:
            return [Text(text)] if text else []
        return super().feed(text)

    def _beginning(self) -> bool:
        """White space and the opening marker, which some models repeat though the prompt had it."""
        start = self._buffer.lstrip()
        marker = self._form.open
        if start.startswith(marker):
            self._buffer, self._state = start[len(marker) :], self._skip_space
            return True
        if marker.startswith(start) and not self._final:
            return False
        self._state = self._skip_space if self._starts_open else self._content
        return bool(self._buffer)

    def _skip_space(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._thinking
        return bool(self._buffer)

    def _thinking(self) -> bool:
        text, marker = self._until(self._ends)
        whole = self._space + text
        solid = whole if self._final and marker is None else whole.rstrip()
        self._space = whole[len(solid) :]
        if solid:
            self._out.append(Thought(solid))
        if marker is None:
            return False
        if marker != self._form.close:
            self._buffer = marker + self._buffer
        self._state = self._skip_to_content
        return True

    def _skip_to_content(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._content
        return bool(self._buffer)

    def _content(self) -> bool:
        if self._buffer:
            self._out.append(Text(self._buffer))
            self._buffer = ""
        return False
