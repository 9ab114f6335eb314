# SPDX-License-Identifier: MIT
"""Tool calls written as a Python list of calls: [f(x=1), g(text="a")], as Llama 4 and Llama 3.2 do.

A call is given out when its closing parenthesis is there; arguments are Python literals, read by `ast` and never run.
A list is taken at the start of an answer or after its marker; whatever does not parse is text.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from tokenspeed.gateway.text.parse.events import CallArguments, CallStart
from tokenspeed.gateway.text.parse.machine import Machine
from tokenspeed.gateway.text.parse.tools import Tools

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_CALL_START = re.compile(r"\s*(?:,\s*)?([A-Za-z_][\w.]*)\(")
_CALL_PREFIX = re.compile(r"\s*(?:,\s*)?([A-Za-z_][\w.]*)?\Z")


class PythonicCalls(Machine):
    """The machine; it needs no data beyond the tools."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._num_calls = 0
        self._raw = ""
        self._scanned = 0
        self._open: list[str] = []
        self._quote = ""
        self._state = self._beginning

    def _beginning(self) -> bool:
        start = self._buffer.lstrip()
        if not self._final and (not start or (_BEGIN.startswith(start) and start != _BEGIN)):
            return False
        lead = len(self._buffer) - len(start)
        if start.startswith(_BEGIN):
            lead += len(_BEGIN)
            start = self._buffer[lead:].lstrip()
            if not start and not self._final:
                return False
            lead = len(self._buffer) - len(start)
        if start.startswith("["):
            self._raw, self._buffer = self._buffer[: lead + 1], start[1:]
            self._state = self._call_or_end
        else:
            self._state = self._content
        return True

    def _content(self) -> bool:
        self._give_text(self._buffer)
        self._buffer = ""
        if self._final and not self._num_calls:
            self._flush_space()
        return False

    def _call_or_end(self) -> bool:
        start = self._buffer.lstrip()
        if self._num_calls and start.startswith("]"):
            self._buffer = start[1:]
            self._state = self._after_list
            return True
        if _CALL_START.match(self._buffer):
            self._scanned, self._open, self._quote = 0, [], ""
            self._state = self._in_call
            return True
        if _CALL_PREFIX.match(self._buffer) and not self._final:
            return False
        return self._give_up()

    def _give_up(self) -> bool:
        self._buffer, self._raw = self._raw + self._buffer, ""
        self._state = self._content
        return True

    def _after_list(self) -> bool:
        start = self._buffer.lstrip()
        if not self._final and _END.startswith(start) and start != _END:
            return False
        if start.startswith(_END):
            self._buffer = start[len(_END) :]
        self._state = self._content
        return True

    def _in_call(self) -> bool:
        end = self._find_end()
        if end is None:
            return self._give_up() if self._final else False
        call = _parse(self._buffer[:end].lstrip(" \t\r\n,"), self._tools)
        if call is None:
            return self._give_up()
        name, arguments = call
        self._out += [CallStart(self._num_calls, name, None), CallArguments(self._num_calls, arguments)]
        self._num_calls += 1
        self._raw = self._space = ""
        self._buffer = self._buffer[end:]
        self._state = self._call_or_end
        return True

    def _find_end(self) -> int | None:
        """Where the call's last parenthesis is, strings and brackets followed; None when it is not there yet."""
        i, text = self._scanned, self._buffer
        while i < len(text):
            character = text[i]
            if self._quote:
                if character == "\\":
                    if i + 1 == len(text):
                        break
                    i += 1
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._open.append(character)
            elif character in ")]}" and self._open:
                self._open.pop()
                if not self._open:
                    return i + 1
            i += 1
        self._scanned = i
        return None


def _parse(text: str, tools: Tools) -> tuple[str, str] | None:
    """(name, arguments as JSON) of one call of a known tool."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
            return None
        name = ast.unparse(call.func)
        if name not in tools:
            return None
        arguments: dict[str, Any] = dict(zip(tools.parameters(name), map(_literal, call.args)))
        if len(arguments) < len(call.args):
            return None
        arguments |= {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """A literal's value; JSON's own words, which models mix in, mean what they mean there."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values) if key is not None}
    return ast.literal_eval(node)
