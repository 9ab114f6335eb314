# SPDX-License-Identifier: MIT
"""A tool call written as one JSON object: {"name": ..., "arguments": {...}}, its arguments passed on as they come.

Keys stand in any order. Until the name is known and known to be a tool, nothing is given out, so an object that is no
call can still be shown as the text that it is. Arguments given as a string hold JSON themselves, and are unwrapped.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from tokenspeed.gateway.text.parse.events import CallArguments, CallStart, Event
from tokenspeed.gateway.text.parse.json_value import JsonValue
from tokenspeed.gateway.text.parse.tools import Tools

_ARGUMENTS = ("arguments", "parameters")


class End(Enum):
    """How far an object has come."""

    OPEN = auto()
    """More text is needed."""
    CALL = auto()
    """The object is complete and was a call."""
    NO_CALL = auto()
    """It is no call: what was fed is text."""
    BROKEN = auto()
    """A call was announced, then its object stopped being JSON."""


class CallObject:
    """One object. `feed` returns how much of the text it took; the rest is not the object's."""

    def __init__(self, tools: Tools, index: int) -> None:
        self.end = End.OPEN
        self.events: list[Event] = []
        """To be taken by the owner after every feed."""
        self.announced = False
        self._tools, self._index = tools, index
        self._step = self._open
        self._value = JsonValue()
        self._collected: list[str] = []
        self._key = ""
        self._arguments: str | None = None
        self._sent = False

    def feed(self, text: str) -> int:
        """Take what belongs to the object."""
        i = 0
        while i < len(text) and self.end is End.OPEN:
            i = self._step(text, i)
        return i

    def _open(self, text: str, i: int) -> int:
        if text[i].isspace():
            return i + 1
        return self._expect(text, i, "{", self._key_or_end)

    def _key_or_end(self, text: str, i: int) -> int:
        if text[i].isspace() or text[i] == ",":
            return i + 1
        if text[i] == "}":
            self._finish()
            return i + 1
        if text[i] != '"':
            return self._break(i)
        self._begin_value()
        self._step = self._key_text
        return i

    def _key_text(self, text: str, i: int) -> int:
        i = self._collect(text, i)
        if self._value.done:
            self._key = _loads("".join(self._collected))
            self._step = self._colon
        return i

    def _colon(self, text: str, i: int) -> int:
        if text[i].isspace():
            return i + 1
        return self._expect(text, i, ":", self._before_value)

    def _before_value(self, text: str, i: int) -> int:
        if text[i].isspace():
            return i + 1
        self._begin_value()
        # A string is unwrapped, and null means no arguments: neither can be passed on as it comes.
        streams = self._key in _ARGUMENTS and self.announced and text[i] not in '"n' and not self._sent
        self._step = self._streamed if streams else self._collected_value
        return i

    def _streamed(self, text: str, i: int) -> int:
        taken, piece = self._value.feed(text[i:])
        if piece:
            self._sent = True
            self.events.append(CallArguments(self._index, piece))
        return self._after_value(i + taken)

    def _collected_value(self, text: str, i: int) -> int:
        i = self._after_value(self._collect(text, i))
        if self._value.done:
            self._take_value("".join(self._collected))
        return i

    def _after_value(self, i: int) -> int:
        if self._value.failed:
            return self._break(i)
        if self._value.done:
            self._step = self._key_or_end
        return i

    def _take_value(self, raw: str) -> None:
        if self._key == "name" and not self.announced:
            name = _loads(raw)
            if name not in self._tools:
                self.end = End.NO_CALL
                return
            self.announced = True
            self.events.append(CallStart(self._index, name, None))
        elif self._key in _ARGUMENTS and self._arguments is None:
            unwrapped = _loads(raw) if raw.startswith('"') else raw
            self._arguments = unwrapped if unwrapped not in ("", "null") else "{}"
        if self.announced and self._arguments is not None and not self._sent:
            self._sent = True
            self.events.append(CallArguments(self._index, self._arguments))

    def _finish(self) -> None:
        self.end = End.CALL if self.announced else End.NO_CALL
        if self.announced and not self._sent:
            self.events.append(CallArguments(self._index, "{}"))

    def _begin_value(self) -> None:
        self._value, self._collected = JsonValue(), []

    def _collect(self, text: str, i: int) -> int:
        taken, piece = self._value.feed(text[i:])
        self._collected.append(piece)
        return i + taken

    def _expect(self, text: str, i: int, character: str, then) -> int:  # type: ignore[no-untyped-def]
        if text[i] != character:
            return self._break(i)
        self._step = then
        return i + 1

    def _break(self, i: int) -> int:
        self.end = End.BROKEN if self.announced else End.NO_CALL
        return i


def _loads(raw: str) -> str:
    """The string that a JSON string means; "" for what is no string."""
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
