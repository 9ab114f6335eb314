# SPDX-License-Identifier: MIT
"""`POST /v1/chat/completions`: from the body to a `Job`, or to an `ApiError` that names the field."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from tokenspeed.config.sampling import RequestError
from tokenspeed.gateway.chat.choice import TextRules
from tokenspeed.gateway.chat.fields import (
    SamplingFields,
    caller_names,
    handling,
    parse_body,
    usage_options,
)
from tokenspeed.gateway.chat.format import ChatFormat, Format, Head
from tokenspeed.gateway.chat.job import Job, check_room
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.chat.reply import ReplyRules
from tokenspeed.gateway.chat.sampling import Sampling
from tokenspeed.gateway.chat.tool_use import ToolChoice, ToolSpec, ToolUse, messages_with_tools, tool_use
from tokenspeed.gateway.chat.turns import continuation
from tokenspeed.gateway.http.errors import ApiError, from_request_error, invalid
from tokenspeed.gateway.text.kept_reasoning import render_keeping
from tokenspeed.gateway.text.parse.output import Plain, TextMachine
from tokenspeed.gateway.text.template import TemplateError

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class CalledFunction(msgspec.Struct, frozen=True):
    """What was called; arguments are JSON, as text or read already."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(msgspec.Struct, frozen=True):
    """A call in an earlier message of the assistant."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """The fields of a message that are checked; the template sees the others too."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields of a chat request that are honoured."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    keep_reasoning: bool | None = None


async def chat_job(body: bytes, model: ServedModel, request_id: str) -> Job:
    """Check everything that can be checked without an engine. Raises `ApiError`."""
    request, raw = await parse_body(body, ChatRequest)

    def make_format(prompt: Sequence[int], request_id: str) -> Format:
        head = Head(request_id, int(time.time()), model.name)
        ids = prompt if request.return_token_ids else None
        return ChatFormat(head, model.tokenizer, usage_options(request), bool(request.logprobs), ids)

    return await conversation_job(request, raw, model, f"chatcmpl-{request_id}", "chat", make_format)


MakeFormat = Callable[[Sequence[int], str], Format]


async def prompt_tokens(request: ChatRequest, raw: Mapping[str, Any], model: ServedModel) -> list[int]:
    """The prompt of a conversation, which may be longer than the context. Raises `ApiError`."""
    model.check_name(request.model)
    use = tool_use(request.tools, raw.get("tools"), request.tool_choice, request.parallel_tool_calls)
    text = _render(request, raw["messages"], use, model)
    return await model.encode(text, "messages", add_special_tokens=False)


async def conversation_job(
    request: ChatRequest, raw: Mapping[str, Any], model: ServedModel, request_id: str, endpoint: str, form: MakeFormat
) -> Job:
    """The job of a conversation, whatever API it came by. raw: `messages` and `tools` as the template sees them.
    form: the format for a prompt and the request's id. Raises `ApiError`."""
    model.check_name(request.model)
    if not request.messages:
        raise invalid("messages", "empty_array", "messages must have at least one message")
    logprobs = _logprobs(request)
    sampling = model.sampling.of(request, logprobs, model.max_model_len)
    use = tool_use(request.tools, raw.get("tools"), request.tool_choice, request.parallel_tool_calls)
    text = _render(request, raw["messages"], use, model)
    sampling = _constrained(sampling, request, raw["messages"][-1], use, text, model)
    params = sampling.params
    reply = _reply_rules(request, raw["messages"][-1], use, text, model)
    # Templates write the special tokens themselves.
    prompt = await model.encode(text, "messages", add_special_tokens=False)
    check_room(request, [prompt], "messages", None, model.max_model_len)
    return Job(
        request_id=request_id,
        endpoint=endpoint,
        prompts=[prompt],
        sampling=sampling,
        handling=handling(request.priority, request.cache_salt, request.data_parallel_rank),
        max_tokens=params.max_new_tokens,
        default_max_tokens=None,
        candidates=params.n,
        rules=TextRules(
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            hidden=model.tokenizer.hidden(params.skip_special_tokens, model.marker_ids if reply else frozenset()),
            continues=bool(request.continue_final_message),
            min_tokens=params.min_new_tokens,
            logprobs=logprobs is not None,
        ),
        reply=reply,
        format=form(prompt, request_id),
        turn=continuation(raw["messages"]) if params.n == 1 else None,
        stream=bool(request.stream),
        names={
            **caller_names(request),
            **({} if use.schema is None else {"json_schema": "tools"}),
            "prompt": "messages",
        },
    )


def _logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "invalid_value", "top_logprobs needs logprobs to be true")
    return (request.top_logprobs or 0) if request.logprobs else None


def _constrained(
    sampling: Sampling, request: ChatRequest, last: Mapping[str, Any], use: ToolUse, prompt: str, model: ServedModel
) -> Sampling:
    """Forced calls as a schema; and any constraint behind the reasoning that the prompt leaves open."""
    if use.schema is not None:
        if sampling.params.constraint is not None:
            message = "tool_choice forces calls and another field constrains the output: give one of them"
            raise invalid("tool_choice", "conflicting_parameters", message)
        sampling = sampling.replace(json_schema=json.dumps(use.schema, ensure_ascii=False))
        try:
            sampling.params.validate(model.tokenizer.size, model.max_model_len)
        except RequestError as error:
            raise from_request_error(error, {"json_schema": "tools"}) from None
    if sampling.params.constraint is None:
        return sampling
    continued = _own_text(last) if request.continue_final_message else None
    return sampling.replace(reasoning_end=model.parsers.open_end(prompt, continued))


def _reply_rules(
    request: ChatRequest, last: dict[str, Any], use: ToolUse, prompt: str, model: ServedModel
) -> ReplyRules | None:
    """The parsers of this request; the machines start in the state that the rendered prompt leaves the model in."""
    continued = _own_text(last) if request.continue_final_message else None
    separate = request.separate_reasoning is not False
    parsers = model.reply_parsers

    def make() -> TextMachine | None:
        if use.callable is not None and use.schema is not None:
            return parsers.forced(use.callable, separate, prompt, continued)
        return parsers.machine(use.callable, separate, prompt, continued)

    if make() is None:
        return None
    return ReplyRules(lambda: make() or Plain(), use.parallel, request.stream_reasoning is not False)


def _own_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _render(request: ChatRequest, messages: list[dict[str, Any]], use: ToolUse, model: ServedModel) -> str:
    if model.template is None:
        raise ApiError(400, "no_chat_template", "this model has no chat template; use /v1/completions", "messages")
    shown: Sequence[Mapping[str, Any]] = [_message(message, i) for i, message in enumerate(messages)]
    continues = bool(request.continue_final_message)
    add_prompt = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if continues and request.add_generation_prompt:
        raise invalid("continue_final_message", "invalid_value", "it excludes add_generation_prompt")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    tools = use.shown
    if not model.template_has_tools and (tools or any("tool_calls" in message for message in shown)):
        shown, tools = messages_with_tools(shown, tools or []), None
    template, documents = model.template, request.documents

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return template.render(
            messages, add_generation_prompt=add_prompt, tools=tools, documents=documents, variables=variables
        )

    keeps = model.keep_reasoning if request.keep_reasoning is None else request.keep_reasoning
    markers = model.parsers.think_markers if keeps else None
    try:
        text = render(shown) if markers is None else render_keeping(shown, markers, render)
    except TemplateError as error:
        raise invalid("messages", "invalid_messages", str(error)) from None
    return _without_end_of_turn(text, shown[-1]) if continues else text


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """The message as templates expect it: text parts only, arguments of earlier tool calls as objects."""
    content = message.get("content")
    if not isinstance(content, str):
        message = _with_content(message, content, f"messages[{number}]")
    calls = message.get("tool_calls")
    if calls:
        message = {**message, "tool_calls": [_tool_call(call) for call in calls]}
    return message


def _with_content(message: dict[str, Any], content: Any, where: str) -> dict[str, Any]:
    """The message with parts that are checked, or with an empty text in the place of none."""
    if isinstance(content, list):
        if not content:
            raise invalid(f"{where}.content", "empty_array", f"{where}.content must have at least one part")
        return {**message, "content": [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]}
    if message["role"] != "assistant":
        raise invalid(f"{where}.content", "missing_required_parameter", f"{where}.content is required")
    return {**message, "content": ""}


def _part(part: dict[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "refusal" and isinstance(part.get("refusal"), str):  # of an earlier answer
        return {"type": "text", "text": part["refusal"]}
    if kind != "text":
        raise invalid(
            f"{where}.type", "unsupported_content", f"{where}: content of type {kind!r} is not supported (text)"
        )
    if not isinstance(part.get("text"), str):
        raise invalid(f"{where}.text", "invalid_type", f"{where}.text must be a string")
    return part


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # no JSON that can be read: the text itself is shown
    return {**call, "function": {**function, "arguments": arguments}}


def _without_end_of_turn(text: str, last: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's own text, so that the model goes on with it."""
    own = _own_text(last).strip()
    end = text.rfind(own)
    if not own or end < 0:
        raise invalid("continue_final_message", "invalid_value", "the last message has no text in the rendered prompt")
    return text[: end + len(own)]
