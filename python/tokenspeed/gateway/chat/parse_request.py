# SPDX-License-Identifier: MIT
"""`POST /parse/function_call` and `/parse/reasoning`: a model's text through the parsers alone, for those who generate
elsewhere. The parser is named in the request, or is the served model's."""

from __future__ import annotations

import msgspec

from tokenspeed.gateway.chat.fields import parse_body
from tokenspeed.gateway.chat.format import encode_json
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.chat.tool_use import ToolSpec, tool_use
from tokenspeed.gateway.http.errors import invalid
from tokenspeed.gateway.text.parse.events import Parsed
from tokenspeed.gateway.text.parse.names import Parsers, UnknownParser, parsers_named
from tokenspeed.gateway.text.parse.tools import Tools

_MAX_CHARACTERS = 1_048_576
_PIECE = 4096
"""Characters at once: machines cut what is done off their buffers."""


class ParseCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The text, the tools that may be called in it, and the parser's name."""

    text: str
    tools: list[ToolSpec]
    tool_call_parser: str | None = None


class ParseReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """The text and the parser's name."""

    text: str
    reasoning_parser: str | None = None


async def parse_calls(body: bytes, model: ServedModel) -> bytes:
    """Content and calls of a text. Raises `ApiError`."""
    request, raw = await parse_body(body, ParseCalls)
    use = tool_use(request.tools, raw["tools"], None, None)
    parsers = _named(None, request.tool_call_parser, "tool_call_parser")
    parsed = _parse(request.text, parsers or Parsers(None, model.parsers.tools), use.callable)
    calls = [{"name": call.name, "parameters": call.arguments} for call in parsed.calls]
    return encode_json({"normal_text": parsed.text, "calls": calls})


async def parse_reasoning(body: bytes, model: ServedModel) -> bytes:
    """Content and reasoning of a text. Raises `ApiError`."""
    request, _ = await parse_body(body, ParseReasoning)
    parsers = _named(request.reasoning_parser, None, "reasoning_parser")
    parsed = _parse(request.text, parsers or Parsers(model.parsers.reasoning, None), None)
    return encode_json({"text": parsed.text, "reasoning_text": parsed.reasoning})


def _named(reasoning: str | None, tools: str | None, field: str) -> Parsers | None:
    if reasoning is None and tools is None:
        return None
    try:
        return parsers_named(reasoning, tools, "")
    except UnknownParser as error:
        raise invalid(field, "invalid_value", str(error)) from None


def _parse(text: str, parsers: Parsers, tools: Tools | None) -> Parsed:
    if len(text) > _MAX_CHARACTERS:
        message = f"text has {len(text)} characters, at most {_MAX_CHARACTERS}"
        raise invalid("text", "string_above_max_length", message)
    machine = parsers.machine(tools, True, "", None)
    if machine is None:
        return Parsed(text=text)
    parsed = Parsed()
    for start in range(0, len(text), _PIECE):
        parsed = parsed.add(machine.feed(text[start : start + _PIECE]))
    return parsed.add(machine.close())
