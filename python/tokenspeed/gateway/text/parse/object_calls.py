# SPDX-License-Identifier: MIT
"""Tool calls written as JSON objects: between tags (Hermes, Qwen), after a marker (Mistral, Llama 3), or bare.

An object that is no call of a known tool is text, marker and all. A call that stops being JSON midway keeps what it
had; the text after it up to the end tag is dropped, because it belongs to no one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.gateway.text.parse.call_object import CallObject, End
from tokenspeed.gateway.text.parse.machine import Machine, Markers
from tokenspeed.gateway.text.parse.tools import Tools


@dataclass(frozen=True)
class ObjectFormat:
    """begin: markers before objects. end: the marker after one object or one list, or "". bare: objects are also taken
    without a marker, where the answer begins with one. lists: a [list] of objects is taken too."""

    begin: tuple[str, ...]
    end: str
    bare: bool
    lists: bool


HERMES = ObjectFormat(("<tool_call>",), "</tool_call>", bare=False, lists=True)
LLAMA3 = ObjectFormat(("<|python_tag|>",), "", bare=True, lists=True)
BARE = ObjectFormat((), "", bare=True, lists=True)
_BETWEEN = " \t\r\n,;"


class ObjectCalls(Machine):
    """The machine of all of them."""

    def __init__(self, tools: Tools, form: ObjectFormat) -> None:
        super().__init__()
        self._tools, self._form = tools, form
        self._markers = Markers(form.begin) if form.begin else None
        self._ends = Markers((form.end,)) if form.end else None
        self._object = CallObject(tools, 0)
        self._num_calls = 0
        self._raw = ""
        self._in_list = False
        self._state = self._beginning if form.bare else self._content

    def _beginning(self) -> bool:
        """Only at the start of an answer may an object stand without a marker."""
        start = self._buffer.lstrip()
        if not start:
            if self._final:
                self._state = self._content
            return self._final
        if start[0] == "{" or (start[0] == "[" and self._form.lists):
            self._raw = self._buffer[: len(self._buffer) - len(start)]
            self._buffer = start
            self._state = self._list_or_object
        else:
            self._state = self._content
        return True

    def _content(self) -> bool:
        if self._markers is None:
            text, marker, self._buffer = self._buffer, None, ""
        else:
            text, marker = self._until(self._markers)
        self._give_text(text)
        if marker is not None:
            self._raw, self._state = marker, self._list_or_object
            return True
        if self._final and not self._num_calls:
            self._flush_space()
        return False

    def _list_or_object(self) -> bool:
        """Right after a marker: white space, perhaps a bracket, then the first object."""
        start = self._buffer.lstrip()
        self._raw += self._buffer[: len(self._buffer) - len(start)]
        self._buffer = start
        if not start:
            return self._give_up() if self._final else False
        self._in_list = start[0] == "[" and self._form.lists
        if self._in_list:
            self._raw += "["
            self._buffer = start[1:]
        self._begin_object()
        return True

    def _begin_object(self) -> None:
        self._object = CallObject(self._tools, self._num_calls)
        self._state = self._in_object

    def _in_object(self) -> bool:
        taken = self._object.feed(self._buffer)
        self._raw += self._buffer[:taken]
        self._buffer = self._buffer[taken:]
        self._out += self._object.events
        self._object.events = []
        if self._object.announced and self._raw:
            self._raw, self._space = "", ""
        match self._object.end:
            case End.OPEN:
                return self._give_up() if self._final else False
            case End.NO_CALL:
                return self._give_up()
            case End.CALL:
                self._state = self._after_object
            case End.BROKEN:
                self._state = self._skip_to_end
        self._num_calls += 1
        return True

    def _give_up(self) -> bool:
        """What was held is text, but for the beginning of one more call of a list that the end of the text cut off.
        The end of the text also ends a call that was announced."""
        cut_off = self._object.end is End.OPEN and self._in_list and self._num_calls > 0
        if self._object.announced and self._object.end is End.OPEN:
            self._num_calls += 1
        if not cut_off:
            self._give_text(self._raw)
        self._raw = ""
        self._object = CallObject(self._tools, self._num_calls)
        self._state = self._content
        return True

    def _after_object(self) -> bool:
        """Another object, the end marker, or text again."""
        start = self._buffer.lstrip(_BETWEEN)
        end = self._form.end
        if not self._final and (not start or (end.startswith(start) and end != start)):
            return False
        skipped, self._buffer = self._buffer[: len(self._buffer) - len(start)], start
        if start.startswith("{"):
            self._raw = skipped
            self._begin_object()
        elif start.startswith("]") and self._in_list:
            self._in_list, self._buffer = False, start[1:]
        elif self._in_list and not start:
            self._state = self._content
        elif end and start.startswith(end):
            self._buffer, self._state = start[len(end) :], self._content
        else:
            self._buffer, self._state = skipped + start, self._content
        return True

    def _skip_to_end(self) -> bool:
        if self._ends is None:
            self._buffer = ""
            return False
        _, marker = self._until(self._ends)
        if marker is not None:
            self._state = self._content
        return marker is not None
