# SPDX-License-Identifier: MIT
"""Tool calls between markers with the name outside of the JSON: DeepSeek V3 and V3.1, Kimi K2, Mistral.

    [section begin] call begin  NAME  separator  {arguments}  call end  [section end]

Which markers a model uses is data. A name that is no tool of the request makes the whole call text again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.gateway.text.parse.events import CallArguments, CallStart
from tokenspeed.gateway.text.parse.json_value import JsonValue
from tokenspeed.gateway.text.parse.machine import Machine, Markers
from tokenspeed.gateway.text.parse.tools import Tools

Name = tuple[str, str | None]


@dataclass(frozen=True)
class MarkedFormat:
    """sections: what begins several calls; section_ends: what ends them, () where there is none.
    separators: the markers between name and arguments, the last of which may be the arguments' own brace. name: (name,
    id) of the text between."""

    sections: tuple[str, ...]
    call: str
    separators: tuple[str, ...]
    call_end: str
    section_ends: tuple[str, ...]
    name: Callable[[str], Name]


def _plain_name(text: str) -> Name:
    return text.strip(), None


def _kimi_name(text: str) -> Name:
    """`functions.NAME:INDEX`, which is also the call's id."""
    call_id = text.strip()
    name, _, index = call_id.rpartition(":")
    return (name if name and index.isdecimal() else call_id).removeprefix("functions."), call_id


def _deepseek_v3_name(text: str) -> Name:
    """`function<sep>NAME` and the fence of the arguments after it."""
    name = text.split("<｜tool▁sep｜>", 1)[-1].strip()
    return name.removesuffix("json").removesuffix("```").strip(), None


def _mistral_name(text: str) -> Name:
    name, _, call_id = text.partition("[CALL_ID]")
    return name.strip(), call_id.strip() or None


DEEPSEEK_V3 = MarkedFormat(
    ("<｜tool▁calls▁begin｜>",),
    "<｜tool▁call▁begin｜>",
    ("{",),
    "<｜tool▁call▁end｜>",
    ("<｜tool▁calls▁end｜>",),
    _deepseek_v3_name,
)
DEEPSEEK_V31 = MarkedFormat(
    ("<｜tool▁calls▁begin｜>",),
    "<｜tool▁call▁begin｜>",
    ("<｜tool▁sep｜>",),
    "<｜tool▁call▁end｜>",
    ("<｜tool▁calls▁end｜>",),
    _plain_name,
)
KIMI_K2 = MarkedFormat(
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    "<|tool_call_begin|>",
    ("<|tool_call_argument_begin|>",),
    "<|tool_call_end|>",
    ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    _kimi_name,
)
MISTRAL_MARKED = MarkedFormat((), "[TOOL_CALLS]", ("[ARGS]", "{"), "", (), _mistral_name)


MARKED_TOKENS = frozenset(
    {
        "<｜tool▁sep｜>",
        *(
            marker
            for form in (DEEPSEEK_V31, KIMI_K2)
            for marker in (*form.sections, form.call, *form.separators, form.call_end, *form.section_ends)
        ),
    }
)
"""Markers that are tokens of their own in their models."""


class MarkedCalls(Machine):
    """The machine of all of them."""

    def __init__(self, tools: Tools, form: MarkedFormat) -> None:
        super().__init__()
        self._tools, self._form = tools, form
        self._begins = Markers([*form.sections, form.call])
        self._separators = Markers(form.separators)
        self._inside = Markers([form.call, *form.section_ends])
        self._ends = Markers([marker for marker in (form.call_end, *form.section_ends, form.call) if marker])
        self._num_calls = 0
        self._raw = ""
        self._name_text = ""
        self._value, self._has_arguments = JsonValue(), False
        self._in_section = False

    def _content(self) -> bool:
        text, marker = self._until(self._begins)
        self._give_text(text)
        if marker is not None:
            self._in_section = marker in self._form.sections
            self._raw, self._name_text = marker, ""
            self._state = self._between if self._in_section else self._name
            return True
        if self._final and not self._num_calls:
            self._flush_space()
        return False

    def _between(self) -> bool:
        """Inside a section, before a call or the section's end. Nothing here is for the user."""
        text, marker = self._until(self._inside)
        self._raw += text
        if marker is None:
            if self._final and not self._num_calls:
                self._give_text(self._raw)
                self._flush_space()
            return False
        self._raw += marker
        self._name_text = ""
        self._state = self._name if marker == self._form.call else self._content
        return True

    def _name(self) -> bool:
        text, marker = self._until(self._separators)
        self._name_text += text
        if marker is None:
            return self._refuse(self._name_text) if self._final else False
        name, call_id = self._form.name(self._name_text)
        if name not in self._tools:
            return self._refuse(self._name_text + marker)
        if marker == "{":
            self._buffer = "{" + self._buffer
        self._space = self._raw = ""
        self._out.append(CallStart(self._num_calls, name, call_id))
        self._value, self._has_arguments = JsonValue(), False
        self._state = self._before_arguments
        return True

    def _refuse(self, held: str) -> bool:
        """The call is text, and so is what follows it."""
        self._give_text(self._raw + held)
        self._raw = ""
        self._state = self._content
        return True

    def _before_arguments(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._arguments
            return True
        if self._final:
            self._end_call("{}")
        return False

    def _arguments(self) -> bool:
        taken, piece = self._value.feed(self._buffer)
        self._buffer = self._buffer[taken:]
        if piece:
            self._has_arguments = True
            self._out.append(CallArguments(self._num_calls, piece))
        if self._value.done or self._value.failed:
            # A separator and then at once the end marker: a call without arguments.
            self._end_call("" if self._has_arguments else "{}")
            return True
        if self._final:
            self._num_calls += 1
        return False

    def _end_call(self, arguments: str) -> None:
        if arguments:
            self._out.append(CallArguments(self._num_calls, arguments))
        self._num_calls += 1
        self._state = self._after_call

    def _after_call(self) -> bool:
        """What stands between the arguments and the end marker (a fence, text of a broken call) is dropped."""
        if not self._form.call_end:
            self._state = self._content
            return True
        _, marker = self._until(self._ends)
        if marker is None:
            return False
        if marker == self._form.call:
            self._state = self._name
            self._raw, self._name_text = marker, ""
        else:
            self._state = self._between if self._in_section and marker == self._form.call_end else self._content
        return True
