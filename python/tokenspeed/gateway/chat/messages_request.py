# SPDX-License-Identifier: MIT
"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, as a conversation for the template.

Blocks become what chat templates know: text, tool calls of an assistant's message, tool results as messages of their
own, thinking as `reasoning_content`. A last message of the assistant is gone on with. What a text model cannot read
(images, documents) is refused by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from tokenspeed.gateway.chat.chat_request import ChatMessage, ChatRequest, conversation_job, prompt_tokens
from tokenspeed.gateway.chat.fields import parse_body
from tokenspeed.gateway.chat.format import Format, Head, encode_json
from tokenspeed.gateway.chat.job import Job
from tokenspeed.gateway.chat.messages_format import MessagesFormat
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.chat.tool_use import FunctionChoice, FunctionSpec, NamedChoice, ToolChoice, ToolSpec
from tokenspeed.gateway.http.errors import ApiError, in_callers_words, invalid, with_flat_tools

Blocks = str | list[dict[str, Any]]


class MessageParam(msgspec.Struct, frozen=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolParam(msgspec.Struct, frozen=True):
    """A tool of the client's own."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoiceParam(msgspec.Struct, frozen=True):
    """auto, any (some tool), tool (the named one) or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct, frozen=True):
    """Whether the model may think first. A budget is advice here: thinking is not cut."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """What the answer is like: a format as `{"type": "json_schema", "schema": ...}`, and an effort for the template."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a request that makes the prompt."""

    model: str | None = None
    messages: list[MessageParam]
    system: Blocks | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    keep_reasoning: bool | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The older place of a format."""


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """The fields that are honoured."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
"""Fields of chat completions by the names that they have here."""
_REFUSED = {
    "mcp_servers": "this server calls no tools itself",
    "container": "this server runs no code",
    "context_management": "prompts are never edited",
}
_EFFORTS = {"max": "high", "xhigh": "high"}
"""Those that templates do not know, by the nearest that they do."""


async def messages_job(body: bytes, model: ServedModel, request_id: str) -> Job:
    """Check everything that can be checked without an engine. Raises `ApiError`."""
    request, fields = await parse_body(body, MessagesRequest)
    _refuse(fields)
    if request.max_tokens < 1:
        raise invalid("max_tokens", "integer_below_min_value", "max_tokens must be at least 1")
    messages = _conversation(request)
    chat = _chat_request(
        request,
        messages,
        {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
            "stream": request.stream,
        },
    )

    def make_format(prompt: Sequence[int], request_id: str) -> Format:
        return MessagesFormat(Head(request_id, int(time.time()), model.name))

    raw = {"messages": messages, "tools": _shown_tools(request.tools)}
    try:
        return await conversation_job(chat, raw, model, f"msg_{request_id}", "messages", make_format)
    except ApiError as error:
        raise with_flat_tools(in_callers_words(error, _NAMES)) from None


async def count_tokens(body: bytes, model: ServedModel) -> bytes:
    """The body of the answer to `count_tokens`. Raises `ApiError`."""
    request, fields = await parse_body(body, CountTokensRequest)
    _refuse(fields)
    messages = _conversation(request)

    raw = {"messages": messages, "tools": _shown_tools(request.tools)}
    try:
        ids = await prompt_tokens(_chat_request(request, messages, {}), raw, model)
    except ApiError as error:
        raise with_flat_tools(in_callers_words(error, _NAMES)) from None
    return encode_json({"input_tokens": len(ids)})


def _refuse(fields: Mapping[str, Any]) -> None:
    for name, reason in _REFUSED.items():
        if fields.get(name) and not (name == "context_management" and _edits_nothing(fields[name])):
            raise invalid(name, "unsupported_parameter", f"{name} is not supported: {reason}")


def _edits_nothing(management: Any) -> bool:
    """Whether no edit is asked for, or only ones that keep all there is."""
    edits = management.get("edits") if isinstance(management, dict) else None
    return isinstance(edits, list) and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    """The format that is asked for, as chat completions spell it. Its schema stands one level higher here."""
    config = request.output_config
    form = config.format if config is not None and config.format is not None else request.output_format
    if form is None:
        return None
    schema = {key: value for key, value in form.items() if key != "type"}
    return {"type": form.get("type"), "json_schema": schema}


def _chat_request(
    request: CountTokensRequest, messages: Sequence[dict[str, Any]], sampling: Mapping[str, Any]
) -> ChatRequest:
    choice = request.tool_choice
    thinking = request.thinking
    variables = None
    if thinking is not None:
        # The two names that templates use for it.
        on = thinking.type != "disabled"
        variables = {"enable_thinking": on, "thinking": on}
    effort = request.output_config.effort if request.output_config is not None else None
    return ChatRequest(
        model=request.model,
        response_format=_response_format(request),
        reasoning_effort=None if effort is None else _EFFORTS.get(effort, effort),
        messages=[msgspec.convert(message, ChatMessage) for message in messages],
        continue_final_message=messages[-1]["role"] == "assistant" if messages else None,
        chat_template_kwargs=variables,
        keep_reasoning=request.keep_reasoning,
        tools=[
            ToolSpec("function", FunctionSpec(tool.name, tool.description, tool.input_schema))
            for tool in request.tools or []
        ],
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        **sampling,
    )


def _tool_choice(choice: ToolChoiceParam) -> ToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "missing_required_parameter", "tool_choice.name is required")
        return NamedChoice(FunctionChoice(choice.name))
    return "required" if choice.type == "any" else choice.type


def _shown_tools(tools: Sequence[ToolParam] | None) -> list[dict[str, Any]]:
    """Tools in the shape that chat templates know."""
    shown = []
    for i, tool in enumerate(tools or []):
        if tool.type not in (None, "custom"):
            message = f"tools[{i}]: a tool of type {tool.type!r} runs at its vendor's; only custom tools are supported"
            raise invalid(f"tools[{i}].type", "unsupported_parameter", message)
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        shown.append({"type": "function", "function": function})
    return shown


def _conversation(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    if not request.messages:
        raise invalid("messages", "empty_array", "messages must have at least one message")
    for i, message in enumerate(request.messages):
        where = f"messages[{i}].content"
        if message.role == "assistant":
            messages.append(_assistant(message.content, where))
        elif message.role == "system":
            messages.append({"role": "system", "content": _text(message.content, where)})
        else:
            messages += _user(message.content, where)
    return messages


def _user(content: Blocks, where: str) -> list[dict[str, Any]]:
    """Tool results first, each a message, then the text: that is the order in which a model expects them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, texts = [], []
    for i, block in enumerate(content):
        at = f"{where}[{i}]"
        if block.get("type") == "tool_result":
            content_of = block.get("content")
            text = "" if content_of is None else _text(content_of, f"{at}.content")
            call_id = _string(block, "tool_use_id", at)
            results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            texts.append(_block_text(block, at))
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts else [])


def _assistant(content: Blocks, where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(content):
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", f"{where}[{i}]"))
            case "redacted_thinking":
                continue  # It is for its maker's eyes only.
            case "tool_use":
                calls.append(_call(block, f"{where}[{i}]"))
            case _:
                texts.append(_block_text(block, f"{where}[{i}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict | None):
        raise invalid(f"{where}.input", "invalid_type", f"{where}.input must be an object")
    function = {"name": _string(block, "name", where), "arguments": json.dumps(given or {}, ensure_ascii=False)}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _text(content: Any, where: str) -> str:
    """The text of a content whose blocks nothing has looked into. Raises `ApiError` 400."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "invalid_type", f"{where} must be a string or a list of blocks")
    return "\n".join([_block_text(block, f"{where}[{i}]") for i, block in enumerate(content)])


def _block_text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        message = f"{where}: a block of type {kind!r} is not supported (text)"
        raise invalid(f"{where}.type", "unsupported_content", message)
    return _string(block, "text", where)


def _string(block: Mapping[str, Any], field: str, where: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise invalid(f"{where}.{field}", "invalid_type", f"{where}.{field} must be a string")
    return value
