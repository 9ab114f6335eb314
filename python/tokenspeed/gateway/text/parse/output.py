# SPDX-License-Identifier: MIT
"""The whole of a choice's text through its machines: reasoning first, then tool calls in what is left."""

from __future__ import annotations

from typing import Protocol

from tokenspeed.gateway.text.parse.events import Event, Text


class TextMachine(Protocol):
    """What every machine of this folder is."""

    @property
    def thinking(self) -> bool: ...
    def feed(self, text: str) -> list[Event]: ...
    def close(self) -> list[Event]: ...


class Plain:
    """All text is content."""

    thinking = False

    def feed(self, text: str) -> list[Event]:
        """The text as it is."""
        return [Text(text)] if text else []

    def close(self) -> list[Event]:
        """Nothing was held."""
        return []


class Chained:
    """`first` splits the reasoning off; its content goes through `second`."""

    def __init__(self, first: TextMachine, second: TextMachine) -> None:
        self._first, self._second = first, second

    @property
    def thinking(self) -> bool:
        """The text that comes next is reasoning."""
        return self._first.thinking

    def feed(self, text: str) -> list[Event]:
        """Events that this text makes certain."""
        return self._through(self._first.feed(text))

    def close(self) -> list[Event]:
        """The last events of both."""
        return self._through(self._first.close()) + self._second.close()

    def _through(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            out += self._second.feed(event.text) if isinstance(event, Text) else [event]
        return out
