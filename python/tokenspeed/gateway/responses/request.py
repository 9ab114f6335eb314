# SPDX-License-Identifier: MIT
"""`POST /v1/responses`: from the body and what is stored to a `Job`, or to an `ApiError` that names the field.

The conversation is what came before (a previous response with all before it, or a stored conversation) and the new
input. Instructions hold for one response only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tokenspeed.gateway.chat.chat_request import ChatMessage, ChatRequest, conversation_job
from tokenspeed.gateway.chat.fields import refuse_by_name
from tokenspeed.gateway.chat.format import Format
from tokenspeed.gateway.chat.job import Job
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.chat.tool_use import (
    AllowedChoice,
    AllowedFunction,
    AllowedFunctions,
    FunctionChoice,
    FunctionSpec,
    NamedChoice,
    ToolChoice,
    ToolSpec,
)
from tokenspeed.gateway.http.errors import ApiError, in_callers_words, invalid, with_flat_tools
from tokenspeed.gateway.responses.format import ResponsesFormat, Store
from tokenspeed.gateway.responses.items import Item, as_messages

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chat completions by the names that they have here."""
_LOGPROBS = "message.output_text.logprobs"
"""Of `include`. What else can be named there is of tools that do not exist here, or is given anyhow."""


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """The function that must be called."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """The functions that may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class ReasoningOptions(msgspec.Struct, frozen=True):
    """effort reaches the chat template; a summary is not made, the reasoning itself is given."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """What the text is like; `format` as `response_format` of chat completions, but for a schema's place."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ConversationRef(msgspec.Struct, frozen=True):
    """A stored conversation."""

    id: str


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    keep_reasoning: bool | None = None

    @property
    def conversation_id(self) -> str | None:
        """The stored conversation that this goes on."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


@dataclass(frozen=True)
class Before:
    """What a response builds on: items of earlier turns, and the new ones."""

    earlier: Sequence[Item]
    new: Sequence[Item]


def check(request: ResponsesRequest, raw: Mapping[str, Any]) -> None:
    """What can be said without looking at what is stored. Raises `ApiError` 400."""
    refuse_by_name({name: value for name, value in raw.items() if name in ("prompt", "lora_path")}, ResponsesRequest)
    if raw.get("prompt") is not None:
        raise invalid("prompt", "unsupported_parameter", "prompt is not supported: there are no stored templates")
    if request.truncation not in (None, "disabled"):
        raise invalid("truncation", "unsupported_parameter", "truncation is not supported: prompts are never cut")
    if request.top_logprobs:
        raise invalid("top_logprobs", "unsupported_parameter", "top_logprobs is not supported; use chat completions")
    if _LOGPROBS in (request.include or ()):
        raise invalid("include", "unsupported_parameter", f"{_LOGPROBS} is not supported; use chat completions")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        message = "text.verbosity is not supported: the model takes no verbosity"
        raise invalid("text.verbosity", "unsupported_parameter", message)
    if request.max_tool_calls is not None:
        raise invalid("max_tool_calls", "unsupported_parameter", "max_tool_calls is not supported: no tool runs here")
    if request.previous_response_id is not None and request.conversation is not None:
        raise invalid("conversation", "invalid_value", "conversation excludes previous_response_id")
    if request.background and request.stream:
        raise invalid("stream", "unsupported_parameter", "a background response is fetched, not streamed")
    if request.background and request.store is False:
        raise invalid("store", "invalid_value", "a background response must be stored to be fetched")


async def response_job(
    request: ResponsesRequest,
    raw: Mapping[str, Any],
    before: Before,
    response_id: str,
    model: ServedModel,
    store: Store,
) -> Job:
    """Check everything that can be checked without an engine. Raises `ApiError`."""
    messages = as_messages(request.instructions, [*before.earlier, *before.new])
    body = response_object(request, raw, response_id, model.name)

    def make_format(prompt: Sequence[int], request_id: str) -> Format:
        return ResponsesFormat(body, store)

    chat = _chat_request(request, messages)
    shown = {"messages": messages, "tools": [_shown(tool) for tool in request.tools or []]}
    try:
        return await conversation_job(chat, shown, model, response_id, "responses", make_format)
    except ApiError as error:
        raise with_flat_tools(in_callers_words(error, _NAMES)) from None


def response_object(request: ResponsesRequest, raw: Mapping[str, Any], response_id: str, model: str) -> dict[str, Any]:
    """The response before it has any output."""
    reasoning = request.reasoning or ReasoningOptions()
    conversation = request.conversation_id
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if request.background else "in_progress",
        "background": bool(request.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation},
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": raw.get("text") or {"format": {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def _chat_request(request: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
    form = request.text.format if request.text is not None else None
    return ChatRequest(
        model=request.model,
        messages=[msgspec.convert(message, ChatMessage) for message in messages],
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        priority=request.priority,
        cache_salt=request.cache_salt,
        keep_reasoning=request.keep_reasoning,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        tools=[
            ToolSpec("function", FunctionSpec(tool.name, tool.description, tool.parameters, tool.strict))
            for tool in request.tools or []
        ],
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        **_response_format(form),
    )


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any]:
    """`text.format` as chat completions spell it. Its schema stands one level higher here."""
    if form is None or form.get("type") in (None, "text"):
        return {}
    if form["type"] != "json_schema":
        return {"response_format": dict(form)}
    return {
        "response_format": {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
    }


def _tool_choice(request: ResponsesRequest) -> ToolChoice | None:
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = [AllowedFunction("function", FunctionChoice(tool.name)) for tool in choice.tools]
        return AllowedChoice(AllowedFunctions(choice.mode, allowed))
    return NamedChoice(FunctionChoice(choice.name)) if isinstance(choice, NamedFunction) else choice


def _shown(tool: FunctionTool) -> dict[str, Any]:
    """A tool in the shape that chat templates know."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
