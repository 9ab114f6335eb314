# SPDX-License-Identifier: MIT
"""Harmony, the format of gpt-oss: messages with a channel each, told apart by special tokens.

    <|start|>assistant<|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{arguments}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

analysis is reasoning; final, and commentary to nobody (a preamble), is content. The prompt ends with
<|start|>assistant, so an answer begins inside a header. Calls of unknown tools are shown as content.
"""

from __future__ import annotations

import re

from tokenspeed.gateway.text.parse.events import CallArguments, CallStart, Text, Thought
from tokenspeed.gateway.text.parse.json_value import JsonValue
from tokenspeed.gateway.text.parse.machine import Machine, Markers
from tokenspeed.gateway.text.parse.tools import Tools

_MESSAGE = Markers(["<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"])
_ENDS = Markers(["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"])
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony(Machine):
    """Reasoning, content and calls in one machine, because one format carries them. With tools=None calls are content
    (the request has none)."""

    MARKERS = frozenset(f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "return", "call"))

    def __init__(self, tools: Tools | None) -> None:
        super().__init__()
        self._tools = tools if tools is not None else Tools({})
        self._header = ""
        self._num_calls = 0
        self._value = JsonValue()
        self._num_contents = 0
        self._state = self._in_header

    @property
    def thinking(self) -> bool:
        """Inside an analysis message."""
        return self._state == self._analysis

    def _in_header(self) -> bool:
        text, marker = self._until(_MESSAGE)
        self._header += text
        if marker is None:
            if self._final and self._header and "<|" not in self._header and not self._num_contents:
                self._out.append(Text(self._header))  # No header at all: the model spoke plainly.
                self._header = ""
            return False
        if marker == "<|message|>":
            self._open_message()
        else:
            self._header = ""
        return True

    def _open_message(self) -> None:
        header, self._header = self._header, ""
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        self._num_contents += 1
        if recipient and recipient.group(1) in self._tools:
            self._out.append(CallStart(self._num_calls, recipient.group(1), None))
            self._value = JsonValue()
            self._state = self._before_call
        elif channel and channel.group(1) == "analysis":
            self._state = self._analysis
        else:
            self._state = self._final_text

    def _analysis(self) -> bool:
        return self._pass_on(Thought)

    def _final_text(self) -> bool:
        return self._pass_on(Text)

    def _pass_on(self, kind: type[Text] | type[Thought]) -> bool:
        text, marker = self._until(_ENDS)
        if text:
            self._out.append(kind(text))
        return self._next_message(marker)

    def _next_message(self, marker: str | None) -> bool:
        if marker is None:
            return False
        self._header = marker if marker == "<|channel|>" else ""
        self._state = self._in_header
        return True

    def _before_call(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer and (self._buffer[0] != "<" or self._final):
            self._state = self._call if self._buffer[0] != "<" else self._empty_call
            return True
        if self._buffer or self._final:
            self._state = self._empty_call
            return True
        return False

    def _empty_call(self) -> bool:
        self._out.append(CallArguments(self._num_calls, "{}"))
        return self._after_call()

    def _call(self) -> bool:
        taken, piece = self._value.feed(self._buffer)
        self._buffer = self._buffer[taken:]
        if piece:
            self._out.append(CallArguments(self._num_calls, piece))
        return self._after_call() if self._value.done or self._value.failed or self._final else False

    def _after_call(self) -> bool:
        self._num_calls += 1
        self._state = self._skip
        return True

    def _skip(self) -> bool:
        _, marker = self._until(_ENDS)
        return self._next_message(marker)
