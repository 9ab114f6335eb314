# SPDX-License-Identifier: MIT
"""Mistral's two ways to write tool calls behind [TOOL_CALLS]: a JSON list, or NAME[ARGS]{...} since its v11 tokenizer.

The first character behind the marker tells which; the machine of that format takes over from there.
"""

from __future__ import annotations

from tokenspeed.gateway.text.parse.machine import Machine, Markers
from tokenspeed.gateway.text.parse.marked_calls import MISTRAL_MARKED, MarkedCalls
from tokenspeed.gateway.text.parse.object_calls import ObjectCalls, ObjectFormat
from tokenspeed.gateway.text.parse.tools import Tools

_MARKER = "[TOOL_CALLS]"
_MARKERS = Markers((_MARKER,))
_LIST = ObjectFormat((_MARKER,), "", bare=False, lists=True)


class MistralCalls(Machine):
    """Finds the marker, then hands over."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._inner: Machine | None = None

    def _content(self) -> bool:
        text, marker = self._until(_MARKERS)
        self._give_text(text)
        if marker is None:
            if self._final:
                self._flush_space()
            return False
        self._state = self._choose
        return True

    def _choose(self) -> bool:
        start = self._buffer.lstrip()
        if not start and not self._final:
            return False
        form: Machine = MarkedCalls(self._tools, MISTRAL_MARKED)
        if start[:1] in ("[", "{"):
            form = ObjectCalls(self._tools, _LIST)
        self._inner = form
        self._buffer = self._space + _MARKER + self._buffer
        self._state = self._handed_over
        return True

    def _handed_over(self) -> bool:
        assert self._inner is not None
        text, self._buffer = self._buffer, ""
        self._out += self._inner.feed(text)
        if self._final:
            self._out += self._inner.close()
        return False
