# SPDX-License-Identifier: MIT
"""What the machines of this folder give out, and how pieces of it are joined.

A stream of text becomes a list of these. However the text was cut, the joined events are the same: all reasoning, all
content, and of each call its index, id, name and argument text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """Content for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning, which is not part of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `id` is the model's own name of it, or None where its format has none."""

    index: int
    name: str
    id: str | None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, a piece of JSON text."""

    index: int
    text: str


Event = Text | Thought | CallStart | CallArguments


@dataclass(slots=True)
class Call:
    """One whole tool call. `arguments` is JSON text unless the model was cut short or wrote something else."""

    name: str
    id: str | None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """Events of one choice, joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> Parsed:
        """Take more events; returns itself."""
        for event in events:
            match event:
                case Text():
                    self.text += event.text
                case Thought():
                    self.reasoning += event.text
                case CallStart():
                    self.calls.append(Call(event.name, event.id))
                case CallArguments():
                    self.calls[event.index].arguments += event.text
        return self
