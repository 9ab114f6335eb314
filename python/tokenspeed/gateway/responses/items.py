# SPDX-License-Identifier: MIT
"""Items of the Responses API: checked, named, and turned into the messages that chat templates read.

Items are kept as the client wrote them, with an id each. Calls that follow an assistant's message belong to it;
reasoning before them too. What a text model cannot read is refused by name.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.gateway.http.errors import invalid

Item = dict[str, Any]
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = ("user", "assistant", "system", "developer")


def new_id(prefix: str) -> str:
    """A fresh id of a kind of object."""
    return f"{prefix}_{secrets.token_hex(16)}"


def input_items(given: str | Sequence[Item], where: str) -> list[Item]:
    """The items of an `input`, each with type and id. Raises `ApiError` 400."""
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"id": new_id("msg"), "type": "message", "role": "user", "content": content}]
    items = [_checked(item, f"{where}[{i}]") for i, item in enumerate(given)]
    if not items:
        raise invalid(where, "empty_array", f"{where} must have at least one item")
    return items


def _checked(item: Item, where: str) -> Item:
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if not isinstance(kind, str) or kind not in _PREFIXES:
        raise invalid(f"{where}.type", "unsupported_content", f"{where}: items of type {kind!r} are not supported")
    if not isinstance(item.get("id"), str | None):
        raise invalid(f"{where}.id", "invalid_type", f"{where}.id must be a string")
    item = {**item, "type": kind, "id": item.get("id") or new_id(_PREFIXES[kind])}
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise invalid(f"{where}.role", "invalid_value", f"{where}.role must be one of {', '.join(_ROLES)}")
        text_of(item.get("content"), f"{where}.content")
    elif kind == "function_call":
        for field in ("call_id", "name", "arguments"):
            _need_text(item, field, where)
    elif kind == "function_call_output":
        _need_text(item, "call_id", where)
        text_of(item.get("output"), f"{where}.output")
    else:
        text_of(_thought(item), f"{where}.content")
    return item


def _thought(item: Item) -> Any:
    """What holds the text of a reasoning item."""
    return item.get("content") or item.get("summary") or []


def _need_text(item: Item, field: str, where: str) -> None:
    if not isinstance(item.get(field), str):
        raise invalid(f"{where}.{field}", "invalid_type", f"{where}.{field} must be a string")


def text_of(content: Any, where: str) -> str:
    """The text of a content: a string, or parts. Raises `ApiError` 400 for parts that hold no text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "invalid_type", f"{where} must be a string or a list of parts")
    texts = []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(str(part.get("refusal") or ""))
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise invalid(f"{at}.type", "unsupported_content", f"{at}: {kind!r} is not supported (text)")
    return "\n".join(texts)


def as_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation that `items` tell."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    thought: str | None = None
    for item in items:
        match item["type"]:
            case "reasoning":
                thought = text_of(_thought(item), "reasoning")
                continue
            case "message":
                role, text = item["role"], text_of(item["content"], "content")
                messages.append({"role": role, "content": text})
            case "function_call":
                _add_call(messages, item)
            case "function_call_output":
                text = text_of(item["output"], "output")
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = None
    return messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
