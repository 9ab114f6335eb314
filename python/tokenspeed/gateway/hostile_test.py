# SPDX-License-Identifier: MIT
"""Values that nobody should send, at every depth of a body: each is 400 with the name of its field, none a 5xx."""

from __future__ import annotations

import copy
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed.gateway.testing.fake_engine import END_TOKEN, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids

FLAGS = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen"]
MANY_DIGITS = "9" * 5000
DEEP = "[" * 5000
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
CHAT = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "18"},
        {"role": "user", "content": "go", "name": "n"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_tokens": 2,
    "custom_params": {"a": 1},
    "chat_template_kwargs": {"x": 1},
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "bad_words_ids": [[5, 6]],
    "user": "u",
}
SCHEMA = {"name": "n", "strict": True, "schema": PARAMETERS}
MESSAGES = {
    "max_tokens": 2,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "18"}]}],
        },
    ],
    "tools": [{"name": "weather", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}, "effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
RESPONSES = {
    "input": [
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
    ],
    "max_output_tokens": 20,
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    "text": {"format": {"type": "json_schema", **SCHEMA}, "verbosity": "medium"},
    "include": ["reasoning.encrypted_content"],
    "store": False,
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    (
        "/v1/chat/completions",
        {"messages": [USER], "max_tokens": 2, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "max_tokens": 2,
            "structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "max_tokens": 2,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]},
            },
        },
    ),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "echo": True, "logprobs": 1}),
    (
        "/generate",
        {
            "text": "hi",
            "sampling_params": {"max_new_tokens": 2, "json_schema": None, "custom_params": {"a": 1}},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    ),
    ("/v1/messages", MESSAGES),
    ("/v1/responses", RESPONSES),
    ("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": "x"}], "metadata": {"a": "b"}}),
    ("/v1/detokenize", {"tokens": [5, 6]}),
]
VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**63, 2**70, -(2**70), "", "x", "\0", "\U0001f469‍\U0001f9b2", MANY_DIGITS, DEEP),
    *([], {}, [None], [[]], [{}], [True], ["x"], {"a": None}, {"type": []}, {"type": {}}, {"type": "text", "text": 1}),
    *({"type": "function", "function": "x"}, {MANY_DIGITS: 1}, json.loads("[" * 400 + "]" * 400)),
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with RunningGateway([replying(ids("<think>hm</think>yes"), 100)], FLAGS) as running:
        yield running


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def with_value(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(body)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


def complaint(connection: http.client.HTTPConnection, path: str, body: Any) -> str:
    """What is wrong with the answer to `body`; empty where nothing is."""
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status == 200:
        return ""
    error = json.loads(answer)["error"]
    named = error["param"] or error["code"] == "invalid_json"
    short = len(answer) < 10_000
    return "" if response.status in (400, 404) and named and short else f"{response.status} {answer[:300]!r}"


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_no_value_at_any_depth_is_a_5xx_or_an_error_without_a_name(gateway: RunningGateway, number: int) -> None:
    path, body = BODIES[number]
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    assert complaint(connection, path, body) == ""
    found = {}
    for place in places(body):
        for value in VALUES:
            wrong = complaint(connection, path, with_value(body, place, value))
            if wrong:
                found[place, str(value)[:40]] = wrong
    connection.close()
    assert found == {}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "x", **fields}, USER]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", message(name=5), "messages[1].name"),
        ("/v1/chat/completions", message(reasoning_content=[]), "messages[1].reasoning_content"),
        ("/v1/chat/completions", message(tool_calls=[{}]), "messages[1].tool_calls[0].function"),
        (
            "/v1/chat/completions",
            message(tool_calls=[{"function": "x"}]),
            "messages[1].tool_calls[0].function",
        ),
        ("/v1/chat/completions", {"messages": [USER], "user": 5}, "user"),
        ("/v1/chat/completions", {"messages": [USER], "custom_params": {"a": 2**64}}, "custom_params"),
        ("/v1/chat/completions", {"messages": [USER], "top_k": -2}, "top_k"),
        ("/v1/chat/completions", {"messages": [USER], "logit_bias": {"1_0": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": [USER], "stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"messages": [USER], "structural_tag": MANY_DIGITS}, "structural_tag"),
        (
            "/v1/chat/completions",
            {
                "messages": [USER],
                "response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": PARAMETERS}},
            },
            "response_format.json_schema.name",
        ),
        ("/generate", {"text": "hi", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ("/generate", {"text": "hi", "return_logprob": True, "logprob_start_len": 2**64}, "logprob_start_len"),
        ("/v1/responses", {"input": "hi", "text": {"format": "json"}}, "text.format"),
        ("/v1/responses", {"input": "hi", "text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/responses", {"input": "hi", "include": ["message.output_text.logprobs"]}, "include"),
        ("/v1/responses", {"input": [{"type": [], "role": "user", "content": "x"}]}, "input[0].type"),
        ("/v1/responses", {"input": [{"id": 5, "role": "user", "content": "x"}]}, "input[0].id"),
        (
            "/v1/conversations",
            {"items": [{"type": "reasoning", "content": [{"type": "x"}]}]},
            "items[0].content[0].type",
        ),
    ],
)
def test_what_an_engine_or_a_template_could_not_take_is_named(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = gateway.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "tool_result", "tool_use_id": "t", "content": 5}, "content"),
        ({"type": "tool_result", "tool_use_id": "t", "content": [5]}, "content[0].type"),
        ({"type": "tool_result", "content": "x"}, "tool_use_id"),
    ],
)
def test_blocks_of_messages_are_looked_into(gateway: RunningGateway, block: dict[str, Any], param: str) -> None:
    status, answer = gateway.post("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": [block]}]})
    assert (status, answer["error"]["param"]) == (400, f"messages[0].content[0].{param}")


@pytest.mark.parametrize("arguments", [MANY_DIGITS, DEEP, "{", ""])
def test_arguments_that_no_json_reader_takes_are_shown_as_they_are(gateway: RunningGateway, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    body = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER], "max_tokens": 2}
    assert gateway.post("/v1/chat/completions", body)[0] == 200


def test_an_error_does_not_give_back_all_of_what_was_sent(gateway: RunningGateway) -> None:
    status, _, answer = gateway.request(
        "POST", "/v1/chat/completions", {"messages": [{"role": "x" * 100_000, "content": "hi"}]}
    )
    assert status == 400
    assert len(answer) < 10_000


def test_a_page_of_items_has_a_limit_that_is_a_number(gateway: RunningGateway) -> None:
    conversation = gateway.post("/v1/conversations", {})[1]["id"]
    status, answer = gateway.get(f"/v1/conversations/{conversation}/items?limit={MANY_DIGITS}")
    assert (status, answer["error"]["param"]) == (400, "limit")


def test_a_sentence_about_two_fields_has_the_callers_names_for_both(gateway: RunningGateway) -> None:
    for path, body in (("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "x"})):
        _, answer = gateway.post(f"/v1/{path}", {**body, "max_tokens": 2, "min_tokens": 5})
        assert answer["error"]["message"] == "min_tokens (5) is more than max_tokens (2)"
    _, answer = gateway.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 5}})
    assert answer["error"]["message"] == "min_new_tokens (5) is more than max_new_tokens (2)"


def test_a_refusal_in_an_earlier_answer_is_its_text(gateway: RunningGateway) -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert gateway.post("/v1/chat/completions", {"messages": [USER, refused, USER], "max_tokens": 1})[0] == 200
    prompt = gateway.engines[0].seen.requests[-1].input_ids
    assert bytes(token - 3 for token in prompt if token > END_TOKEN).decode().count("No.") == 1
