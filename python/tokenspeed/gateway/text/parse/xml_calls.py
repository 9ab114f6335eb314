# SPDX-License-Identifier: MIT
"""Tool calls written as tags with one element a parameter: Qwen3-Coder, GLM 4.5, MiniMax M2, DeepSeek V3.2.

Parameters are bare text, so their JSON type comes from the tool's schema. Text of a string parameter is passed on as it
comes (a long file's content streams); any other value is given whole when its element ends. Tags are data.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from tokenspeed.gateway.text.parse.events import CallArguments, CallStart
from tokenspeed.gateway.text.parse.machine import Machine, Markers
from tokenspeed.gateway.text.parse.tools import Tools
from tokenspeed.gateway.text.parse.xml_slips import OpenValues


@dataclass(frozen=True)
class XmlFormat:
    """section, section_end: tags around one or several calls. call: matches a call's opening with the group `name`,
    which begins with call_head and goes on as call_rest says until it is whole; call_end closes it, and may be the
    section's end. parameter: matches a parameter's opening up to its value, with the group `name` and perhaps `string`,
    which begins with parameter_head; parameter_end closes it. trims_lines: one line break on either side of a value
    belongs to the format. bare: models are known to leave out the section's tag, so a call is also taken without it."""

    section: str
    section_end: str
    call_head: str
    call_rest: re.Pattern[str]
    call: re.Pattern[str]
    call_end: str
    parameter_head: str
    parameter: re.Pattern[str]
    parameter_end: str
    trims_lines: bool
    bare: bool = False

    @property
    def open_values(self) -> OpenValues:
        """Where values end that are not closed."""
        followers: dict[str, tuple[str, ...]] = {self.section_end: (self.section,)}
        if self.bare:
            followers[self.section_end] += (self.call_head,)
        if self.call_end != self.section_end:
            followers[self.call_end] = (self.section_end, self.section, self.call_head)
        return OpenValues(self.parameter_head, self.parameter, followers)


_TO_TAG_END = re.compile(r"[^>\n]*")

QWEN_CODER = XmlFormat(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    _TO_TAG_END,
    re.compile(r"\s*<function=(?P<name>[^>\n]*)>"),
    "</function>",
    "<parameter=",
    re.compile(r"\s*<parameter=(?P<name>[^>\n]*)>"),
    "</parameter>",
    trims_lines=True,
    bare=True,
)
GLM45 = XmlFormat(
    "<tool_call>",
    "</tool_call>",
    "",
    re.compile(r"[^<\n]*\s*"),
    re.compile(r"\s*(?P<name>[^<\n]+?)\s*(?=<)"),
    "</tool_call>",
    "<arg_key>",
    re.compile(r"\s*<arg_key>(?P<name>[^<]*)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    trims_lines=False,
)
MINIMAX_M2 = XmlFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<invoke name=",
    _TO_TAG_END,
    re.compile(r'\s*<invoke name="?(?P<name>[^">]*)"?>'),
    "</invoke>",
    "<parameter name=",
    re.compile(r'\s*<parameter name="?(?P<name>[^">]*)"?>'),
    "</parameter>",
    trims_lines=True,
)
DEEPSEEK_V32 = XmlFormat(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    "<｜DSML｜invoke name=",
    _TO_TAG_END,
    re.compile(r'\s*<｜DSML｜invoke name="(?P<name>[^"]*)">'),
    "</｜DSML｜invoke>",
    "<｜DSML｜parameter name=",
    re.compile(r'\s*<｜DSML｜parameter name="(?P<name>[^"]*)"(?: string="(?P<string>true|false)")?>'),
    "</｜DSML｜parameter>",
    trims_lines=False,
)
SEED_OSS = replace(QWEN_CODER, section="<seed:tool_call>", section_end="</seed:tool_call>")
_LONGEST_TAG = 512


class XmlCalls(Machine):
    """The machine of all of them."""

    def __init__(self, tools: Tools, form: XmlFormat) -> None:
        super().__init__()
        self._tools, self._form = tools, form
        self._begins = Markers([form.section, form.call_head] if form.bare else [form.section])
        self._open_values = form.open_values
        self._value_ends = Markers([form.parameter_end, *self._open_values.markers])
        self._num_calls = 0
        self._num_parameters = 0
        self._raw = ""
        self._name = self._parameter = ""
        self._value = ""
        self._streams = self._value_begun = False

    def _content(self) -> bool:
        text, marker = self._until(self._begins)
        self._give_text(text)
        if marker is not None:
            self._raw, self._state = marker, self._call_or_end
            if marker != self._form.section:
                self._raw, self._buffer = "", marker + self._buffer
            return True
        if self._final and not self._num_calls:
            self._flush_space()
        return False

    def _call_or_end(self) -> bool:
        """Inside a section: a call's opening or the section's end."""
        if self._closes(self._form.section_end):
            self._state = self._content
            return True
        found = self._opening(self._form.call)
        if found is None:
            return False if self._may_be_opening() and not self._final else self._refuse()
        name = found.group("name").strip()
        if name not in self._tools:
            return self._refuse()
        self._buffer = self._buffer[found.end() :]
        self._raw = self._space = ""
        self._name, self._num_parameters = name, 0
        self._out.append(CallStart(self._num_calls, name, None))
        self._state = self._parameter_or_end
        return True

    def _opening(self, tag: re.Pattern[str]) -> re.Match[str] | None:
        """`tag` at the buffer's start behind white space. Only as far as a tag may reach: patterns with white space of
        their own would take the square of what a model writes that has lost its way."""
        lead = len(self._buffer) - len(self._buffer.lstrip())
        return tag.match(self._buffer, lead, lead + _LONGEST_TAG + 1)

    def _may_be_opening(self) -> bool:
        """Could more text make the buffer a call's opening, or the section's end?"""
        start, head = self._buffer.lstrip(), self._form.call_head
        if len(start) > _LONGEST_TAG:
            return False
        if head.startswith(start) or self._form.section_end.startswith(start):
            return True
        return start.startswith(head) and self._form.call_rest.fullmatch(start, len(head)) is not None

    def _refuse(self) -> bool:
        """No call: its marker is text, and so is what follows. After calls of the section there is nothing to show."""
        head = self._form.call_head
        if self._form.bare and self._buffer.startswith(head):
            # It would be taken for a call again.
            self._raw, self._buffer = self._raw + head, self._buffer[len(head) :]
        self._give_text(self._raw)
        self._raw = ""
        self._state = self._content
        return True

    def _closes(self, tag: str) -> bool:
        """Take `tag`, if it stands at the buffer's start behind white space."""
        start = self._buffer.lstrip()
        if not start.startswith(tag):
            return False
        self._buffer = start[len(tag) :]
        return True

    def _parameter_or_end(self) -> bool:
        if self._closes(self._form.call_end):
            self._end_call()
            self._state = self._content if self._form.call_end == self._form.section_end else self._call_or_end
            return True
        if self._closes(self._form.section_end):  # a model forgot to close the call
            self._end_call()
            self._state = self._content
            return True
        found = self._opening(self._form.parameter)
        if found is not None:
            self._begin_value(found)
            return True
        if self._final or self._is_junk():
            # Cut short, or text where none belongs: the call has the parameters that came whole.
            self._end_call()
            self._state = self._content
            return True
        return False

    def _is_junk(self) -> bool:
        start = self._buffer.lstrip()
        return bool(start) and (start[0] != "<" or len(start) > _LONGEST_TAG)

    def _begin_value(self, found: re.Match[str]) -> None:
        self._parameter = found.group("name").strip()
        is_string = found.groupdict().get("string")
        types = self._tools.types(self._name, self._parameter)
        self._streams = is_string == "true" or (is_string is None and types == {"string"})
        self._value, self._value_begun = "", False
        lead = "{" if not self._num_parameters else ", "
        key = json.dumps(self._parameter, ensure_ascii=False)
        self._give_arguments(f"{lead}{key}: " + ('"' if self._streams else ""))
        self._num_parameters += 1
        self._buffer = self._buffer[found.end() :]
        self._state = self._in_value

    def _in_value(self) -> bool:
        text, marker = self._until(self._value_ends)
        self._value += text
        ended = marker == self._form.parameter_end or self._final
        if marker not in (None, self._form.parameter_end):
            goes_on = self._open_values.ends(marker, self._buffer, self._tools.parameters(self._name), self._final)
            if goes_on is False:
                self._value += marker
                return True
            self._buffer = marker + self._buffer
            ended = bool(goes_on)
        if self._form.trims_lines:
            self._trim(ended)
        if self._streams:
            self._stream(ended)
        elif ended:
            self._give_arguments(self._tools.as_json(self._name, self._parameter, self._value))
        if ended:
            self._state = self._parameter_or_end
        return ended

    def _trim(self, ended: bool) -> None:
        if self._value and not self._value_begun:
            self._value_begun = True
            self._value = self._value.removeprefix("\n")
        if ended:
            self._value = self._value.removesuffix("\n")

    def _stream(self, ended: bool) -> None:
        """Pass on what is certain: a last line break may belong to the format."""
        held = "\n" if self._form.trims_lines and not ended and self._value.endswith("\n") else ""
        text = self._value.removesuffix(held) if held else self._value
        self._give_arguments(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if ended else ""))
        self._value = held

    def _give_arguments(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(self._num_calls, text))

    def _end_call(self) -> None:
        self._give_arguments("}" if self._num_parameters else "{}")
        self._num_calls += 1
