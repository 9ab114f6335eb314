# SPDX-License-Identifier: MIT
"""The tools of a chat request: what the template shows, what may be called, and what a forced call must look like.

`tool_choice` none takes the tools out of the prompt, so nothing can be called. auto leaves the choice to the model.
required and a named function force calls by a JSON schema, whatever the model's own format is. allowed_tools shows all
tools, of which only some may be called. A template that knows
no tools still serves them: they are described in the system message and calls are written between tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tokenspeed.gateway.http.errors import invalid
from tokenspeed.gateway.text.parse.tools import Tools

Message = Mapping[str, Any]


class FunctionSpec(msgspec.Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool. Only functions exist."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionChoice(msgspec.Struct, frozen=True):
    """The function that a named choice names."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """`tool_choice` with a function that must be called."""

    function: FunctionChoice


class AllowedFunction(msgspec.Struct, frozen=True):
    """One of those that may be called."""

    type: Literal["function"]
    function: FunctionChoice


class AllowedFunctions(msgspec.Struct, frozen=True):
    """Which tools may be called, and whether some call must come."""

    mode: Literal["auto", "required"]
    tools: list[AllowedFunction]


class AllowedChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """`tool_choice` that leaves the prompt as it is, so that it stays cached, and lets only some tools be called."""

    allowed_tools: AllowedFunctions


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


@dataclass(frozen=True)
class ToolUse:
    """What a request's tools come to."""

    callable: Tools | None
    """None: nothing may be called, and text that looks like a call is text."""
    shown: Sequence[dict[str, Any]] | None
    """Tools for the template, as the client wrote them."""
    schema: dict[str, Any] | None
    """The JSON schema that forces calls; None: the model chooses."""
    parallel: bool


NO_TOOLS = ToolUse(None, None, None, True)


def tool_use(tools: Sequence[ToolSpec] | None, raw: Any, choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """Resolve the fields of a request; `raw` is its `tools` as it came. Raises `ApiError` 400."""
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise invalid("tool_choice", "invalid_value", "tool_choice needs tools")
        return NO_TOOLS
    _check_names(tools)
    if choice == "none":
        return NO_TOOLS
    chosen = [tool.function for tool in tools]
    if isinstance(choice, NamedChoice):
        chosen = _named(chosen, [choice.function.name])
    mode = choice
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        mode = allowed.mode
        chosen = _named(chosen, [tool.function.name for tool in allowed.tools])
    forced = mode is not None and mode != "auto"
    single = isinstance(choice, NamedChoice) or parallel is False
    return ToolUse(
        callable=Tools({function.name: function.parameters for function in chosen}),
        shown=raw,
        schema=_calls_schema(chosen, single) if forced else None,
        parallel=not single if forced else parallel is not False,
    )


def _named(functions: Sequence[FunctionSpec], names: Sequence[str]) -> list[FunctionSpec]:
    """Those of the names. Raises `ApiError` 400 for a name that is not there."""
    known = {function.name: function for function in functions}
    if not names:
        raise invalid("tool_choice", "invalid_value", "tool_choice allows no tool; none says that")
    for name in names:
        if name not in known:
            raise invalid("tool_choice", "invalid_value", f"tool_choice names {name!r}, which is not among the tools")
    return [known[name] for name in dict.fromkeys(names)]


def _check_names(tools: Sequence[ToolSpec]) -> None:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name, where = tool.function.name, f"tools[{i}].function.name"
        if not name:
            raise invalid(where, "invalid_value", f"{where} must not be empty")
        if name in seen:
            raise invalid(where, "invalid_value", f"{where}: {name!r} is there twice")
        seen.add(name)


def _calls_schema(functions: Sequence[FunctionSpec], single: bool) -> dict[str, Any]:
    """A list of calls, each of one of the functions with arguments that its schema allows."""
    calls = []
    definitions: dict[str, Any] = {}
    for function in functions:
        parameters = dict(function.parameters or {"type": "object", "properties": {}})
        # Definitions are looked up from the root, so they move there.
        for key in ("$defs", "definitions"):
            definitions.setdefault(key, {}).update(parameters.pop(key, None) or {})
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if single:
        schema["maxItems"] = 1
    return schema | {key: value for key, value in definitions.items() if value}


_INSTRUCTIONS = (
    "You can call functions. Their signatures, as JSON, are:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write a JSON object with its name and arguments between tags:\n<tool_call>\n{{"name": "...", '
    '"arguments": {{...}}}}\n</tool_call>'
)


def messages_with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The conversation for a template without tools: signatures in the system message, calls and results as text."""
    shown = [_as_text(message) for message in messages]
    if not tools:
        return shown
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=listed)
    if shown and shown[0]["role"] in ("system", "developer"):
        return [{**shown[0], "content": f"{_text_of(shown[0])}\n\n{instructions}"}, *shown[1:]]
    return [{"role": "system", "content": instructions}, *shown]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text_of(message)}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [_text_of(message)] if _text_of(message) else []
    for call in calls:
        function = call.get("function") or {}
        written = {"name": function.get("name"), "arguments": function.get("arguments")}
        lines.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(lines)}


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
