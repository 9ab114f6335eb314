# SPDX-License-Identifier: MIT
"""What every path takes and answers, as data: the source of `/openapi.json`. No logic.

Bodies of requests are the structs that parse them. Answers are described as far as programs rely on them; objects may
hold more than is said. A test holds this table against the routes, another the answers against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.gateway.chat.chat_request import ChatRequest
from tokenspeed.gateway.chat.completion_request import CompletionRequest
from tokenspeed.gateway.chat.generate_request import GenerateRequest
from tokenspeed.gateway.chat.messages_request import CountTokensRequest, MessagesRequest
from tokenspeed.gateway.chat.parse_request import ParseCalls, ParseReasoning
from tokenspeed.gateway.http.admin import ProfileBody, WorkerBody, WorkerChange
from tokenspeed.gateway.http.server import DetokenizeRequest, TokenizeRequest
from tokenspeed.gateway.responses.api import ConversationBody, ItemsBody
from tokenspeed.gateway.responses.request import ResponsesRequest

Schema = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    summary: str
    answer: Schema | str
    """The JSON of a success: a schema, or the name of one in `SCHEMAS`."""
    body: type[msgspec.Struct] | None = None
    status: int = 200
    streams: bool = False
    """With `stream: true`, the answer is a text/event-stream."""
    keyed: bool = True
    """Needs an API key where keys are set."""
    media: str = "application/json"
    error: str = "Error"
    """Name of the schema of its errors."""
    paged: bool = False
    """Takes limit, order and after."""
    unready: bool = False
    """503 is an answer of the same shape."""
    optional_body: bool = False


_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "integer"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_ANY: Schema = {}


def _object(**properties: Schema) -> Schema:
    """All of `properties` are always there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _const(value: str) -> Schema:
    return {"const": value}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _page(items: Schema) -> Schema:
    return _object(
        object=_const("list"),
        data=_array(items),
        first_id=_MAYBE_TEXT,
        last_id=_MAYBE_TEXT,
        has_more={"type": "boolean"},
    )


_USAGE = _object(prompt_tokens=_NUMBER, completion_tokens=_NUMBER, total_tokens=_NUMBER)
_CHAT_CHOICE = _object(
    index=_NUMBER,
    message=_object(role=_const("assistant"), content=_MAYBE_TEXT),
    finish_reason={"enum": ["stop", "length", "tool_calls", "abort"]},
)
_COMPLETION_CHOICE = _object(index=_NUMBER, text=_TEXT, finish_reason={"enum": ["stop", "length", "abort"]})
_GENERATED = _object(text=_TEXT, meta_info=_object(id=_TEXT, prompt_tokens=_NUMBER, completion_tokens=_NUMBER))

SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_TEXT)),
    "MessagesError": _object(type=_const("error"), error=_object(type=_TEXT, message=_TEXT)),
    "ChatCompletion": _object(
        id=_TEXT,
        object=_const("chat.completion"),
        created=_NUMBER,
        model=_TEXT,
        choices=_array(_CHAT_CHOICE),
        usage=_USAGE,
    ),
    "Completion": _object(
        id=_TEXT,
        object=_const("text_completion"),
        created=_NUMBER,
        model=_TEXT,
        choices=_array(_COMPLETION_CHOICE),
        usage=_USAGE,
    ),
    "Message": _object(
        id=_TEXT,
        type=_const("message"),
        role=_const("assistant"),
        model=_TEXT,
        content=_array(_object(type=_TEXT)),
        stop_reason=_MAYBE_TEXT,
        usage=_object(input_tokens=_NUMBER, output_tokens=_NUMBER),
    ),
    "Generated": {"anyOf": [_GENERATED, _array(_GENERATED)]},
    "Response": _object(
        id=_TEXT,
        object=_const("response"),
        created_at=_NUMBER,
        status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        model=_TEXT,
        output=_array(_object(type=_TEXT)),
    ),
    "Item": _object(id=_TEXT, type=_TEXT),
    "Items": _page(_ref("Item")),
    "Conversation": _object(id=_TEXT, object=_const("conversation"), created_at=_NUMBER, metadata={"type": "object"}),
    "Deleted": _object(id=_TEXT, object=_TEXT, deleted={"const": True}),
    "Model": _object(
        id=_TEXT,
        object=_const("model"),
        created=_NUMBER,
        owned_by=_TEXT,
        max_model_len={"type": ["integer", "null"]},
    ),
    "Models": _object(object=_const("list"), data=_array(_ref("Model"))),
    "Worker": _object(
        id=_TEXT,
        url=_TEXT,
        model=_MAYBE_TEXT,
        state=_TEXT,
        reason=_MAYBE_TEXT,
        circuit_breaker=_TEXT,
        load=_NUMBER,
        ranks=_NUMBER,
    ),
    "Workers": _object(workers=_array(_ref("Worker")), total=_NUMBER),
    "Accepted": _object(status=_const("accepted"), worker_id=_TEXT, url=_TEXT, location=_TEXT, message=_TEXT),
    "Loads": _object(workers=_array(_object(worker=_TEXT, state=_TEXT, load=_NUMBER, ranks=_array(_ANY)))),
    "Health": _object(status={"enum": ["ok", "unhealthy"]}, workers=_array(_object(url=_TEXT, state=_TEXT))),
    "Readiness": _object(status={"enum": ["ready", "not ready", "draining"]}, workers=_NUMBER, workers_ready=_NUMBER),
}

_COUNT = _object(input_tokens=_NUMBER)
_TOKENS = _object(tokens=_array(_NUMBER), count=_NUMBER)
_CALL = _object(name=_TEXT, parameters=_TEXT)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation("Answer a conversation", "ChatCompletion", ChatRequest, streams=True),
    ("POST", "/v1/completions"): Operation("Go on with a text", "Completion", CompletionRequest, streams=True),
    ("POST", "/v1/messages"): Operation(
        "Answer a conversation, in Anthropic's shape", "Message", MessagesRequest, streams=True, error="MessagesError"
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Tokens of a conversation's prompt", _COUNT, CountTokensRequest, error="MessagesError"
    ),
    ("POST", "/generate"): Operation("Go on with texts, in SGLang's shape", "Generated", GenerateRequest, streams=True),
    ("POST", "/v1/responses"): Operation("Make a response", "Response", ResponsesRequest, streams=True),
    ("GET", "/v1/responses/{id}"): Operation("A stored response", "Response"),
    ("DELETE", "/v1/responses/{id}"): Operation("Delete a stored response", "Deleted"),
    ("POST", "/v1/responses/{id}/cancel"): Operation("End a background response", "Response"),
    ("GET", "/v1/responses/{id}/input_items"): Operation("What a response was asked", "Items", paged=True),
    ("POST", "/v1/conversations"): Operation(
        "Begin a conversation", "Conversation", ConversationBody, optional_body=True
    ),
    ("GET", "/v1/conversations/{id}"): Operation("A conversation", "Conversation"),
    ("POST", "/v1/conversations/{id}"): Operation("Replace its metadata", "Conversation", ConversationBody),
    ("DELETE", "/v1/conversations/{id}"): Operation("Delete a conversation and its items", "Deleted"),
    ("POST", "/v1/conversations/{id}/items"): Operation("Add items", "Items", ItemsBody),
    ("GET", "/v1/conversations/{id}/items"): Operation("Its items", "Items", paged=True),
    ("GET", "/v1/conversations/{id}/items/{item}"): Operation("One item", "Item"),
    ("DELETE", "/v1/conversations/{id}/items/{item}"): Operation("Delete an item", "Conversation"),
    ("GET", "/v1/models"): Operation("What is served", "Models", keyed=False),
    ("GET", "/v1/models/{id}"): Operation("One model", "Model", keyed=False),
    ("POST", "/v1/tokenize"): Operation("Text to tokens", _TOKENS, TokenizeRequest),
    ("POST", "/v1/detokenize"): Operation("Tokens to text", _object(text=_TEXT), DetokenizeRequest),
    ("POST", "/parse/function_call"): Operation(
        "Calls in a text", _object(normal_text=_TEXT, calls=_array(_CALL)), ParseCalls
    ),
    ("POST", "/parse/reasoning"): Operation(
        "Reasoning in a text", _object(text=_TEXT, reasoning_text=_TEXT), ParseReasoning
    ),
    ("GET", "/health"): Operation("Whether an engine serves", "Health", keyed=False, unready=True),
    ("GET", "/liveness"): Operation("That this process runs", _object(status=_const("ok")), keyed=False),
    ("GET", "/readiness"): Operation("Whether requests are taken", "Readiness", keyed=False, unready=True),
    ("GET", "/metrics"): Operation("Metrics for Prometheus", _TEXT, keyed=False, media="text/plain"),
    ("GET", "/get_loads"): Operation("Load of every rank", "Loads"),
    ("GET", "/loads"): Operation("Load of every rank", "Loads"),
    ("POST", "/flush_cache"): Operation(
        "Empty every engine's prefix cache", _object(success={"type": "boolean"}, workers=_array(_ANY))
    ),
    ("POST", "/start_profile"): Operation(
        "Every engine records a trace",
        _object(success={"type": "boolean"}, workers=_array(_ANY)),
        ProfileBody,
        optional_body=True,
    ),
    ("POST", "/stop_profile"): Operation(
        "Every engine writes its trace", _object(success={"type": "boolean"}, workers=_array(_ANY))
    ),
    ("GET", "/workers"): Operation("The workers", "Workers"),
    ("POST", "/workers"): Operation("Add a worker", "Accepted", WorkerBody, status=202),
    ("GET", "/workers/{id}"): Operation("One worker", "Worker"),
    ("PUT", "/workers/{id}"): Operation("Set a worker's priority", "Accepted", WorkerChange, status=202),
    ("PATCH", "/workers/{id}"): Operation("Change a worker's priority", "Accepted", WorkerChange, status=202),
    ("DELETE", "/workers/{id}"): Operation("Drain and remove a worker", "Accepted", status=202),
    ("GET", "/openapi.json"): Operation("This document", {"type": "object"}, keyed=False),
    ("GET", "/"): Operation("A chat for people", _TEXT, keyed=False, media="text/html"),
}
