# SPDX-License-Identifier: MIT
"""Anthropic's Messages API through the real server with the anthropic client, against a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tokenspeed.gateway.testing.fake_engine import END_TOKEN, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

ANSWER = (
    "<think>\nWhich city?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOOLS: list[Any] = [
    {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "now", "description": "The time", "input_schema": {"type": "object", "properties": {}}},
]
HI: list[Any] = [{"role": "user", "content": "hi"}]


def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    plain = "[user]plain" in sent_text(request.input_ids)
    for step in replying(ids("Hello there" if plain else ANSWER), 1 if request.stream else 1000)(request):
        yield Step(step.tokens, step.finish, cached=4)


def sent_text(token_ids: list[int]) -> str:
    return bytes(token - 3 for token in token_ids if token > END_TOKEN).decode()


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    flags = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen", "--api-key", "k"]
    with RunningGateway([script], flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url(""), api_key="k", max_retries=0)


def shape(message: Any) -> list[tuple[object, ...]]:
    shapes: dict[str, Any] = {
        "text": lambda block: ("text", block.text),
        "thinking": lambda block: ("thinking", block.thinking),
        "tool_use": lambda block: ("tool_use", block.name, block.input),
    }
    return [shapes[block.type](block) for block in message.content]


EXPECTED = [
    ("thinking", "Which city?"),
    ("text", "Let me see."),
    ("tool_use", "weather", {"city": "Zürich 🙂"}),
    ("tool_use", "now", {}),
]


def test_a_whole_answer_has_blocks_reason_and_usage(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    message = client.messages.create(model="fake-model", max_tokens=999, messages=HI, tools=TOOLS)
    assert shape(message) == EXPECTED
    assert message.stop_reason == "tool_use"
    num_prompt = len(gateway.engines[0].seen.requests[-1].input_ids)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (num_prompt - 4, 4)
    assert message.usage.output_tokens == len(ids(ANSWER)) + 1


def test_a_stream_has_the_whole_sequence_of_events_and_joins_to_the_same_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="fake-model", max_tokens=999, messages=HI, tools=TOOLS) as stream:
        final = stream.get_final_message()
    assert shape(final) == EXPECTED
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == len(ids(ANSWER)) + 1


def test_events_come_named_and_in_order(gateway: RunningGateway) -> None:
    body = {"max_tokens": 999, "messages": HI, "tools": TOOLS, "stream": True}
    _, _, answer = gateway.request("POST", "/v1/messages", body, {"x-api-key": "k"})
    events = [block.split("\n") for block in answer.decode().strip().split("\n\n")]
    names = [event[0].removeprefix("event: ") for event in events]
    data = [json.loads(event[1].removeprefix("data: ")) for event in events]
    assert names == [item["type"] for item in data]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]
    opened = [item["index"] for item in data if item["type"] == "content_block_start"]
    stopped = [item["index"] for item in data if item["type"] == "content_block_stop"]
    assert opened == stopped == [0, 1, 2, 3]
    start = data[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0


def test_system_tools_and_results_reach_the_template(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    messages: list[Any] = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "t1", "name": "now", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]},
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    client.messages.create(model="fake-model", max_tokens=9, messages=messages, tools=TOOLS, system=system)
    sent = sent_text(gateway.engines[0].seen.requests[-1].input_ids)
    assert sent.startswith("[system]Be kind.\n\nYou can call functions.")
    assert '"name": "weather"' in sent
    call = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    result = "<tool_response>\nnoon\n</tool_response>"
    assert f"[user]hi[assistant]One moment.\n{call}[user]{result}[user]And?[assistant]" in sent


def test_stop_reasons_tell_length_stop_sequence_and_end_of_turn(client: anthropic.Anthropic) -> None:
    plain: list[Any] = [{"role": "user", "content": "plain"}]
    assert client.messages.create(model="fake-model", max_tokens=3, messages=plain).stop_reason == "max_tokens"
    whole = client.messages.create(model="fake-model", max_tokens=99, messages=plain)
    assert (whole.stop_reason, shape(whole)) == ("end_turn", [("text", "Hello there")])
    cut = client.messages.create(model="fake-model", max_tokens=99, messages=plain, stop_sequences=["o t"])
    assert (cut.stop_reason, cut.stop_sequence, shape(cut)) == ("stop_sequence", "o t", [("text", "Hell")])


def test_an_assistant_message_at_the_end_is_gone_on_with(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    messages: list[Any] = [*HI, {"role": "assistant", "content": "Once"}]
    client.messages.create(model="fake-model", max_tokens=3, messages=messages)
    assert sent_text(gateway.engines[0].seen.requests[-1].input_ids).endswith("[assistant]Once")


def test_tokens_are_counted_as_the_prompt_would_be(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    count = client.messages.count_tokens(model="fake-model", messages=HI, tools=TOOLS).input_tokens
    client.messages.create(model="fake-model", max_tokens=3, messages=HI, tools=TOOLS)
    assert count == len(gateway.engines[0].seen.requests[-1].input_ids)


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": "many"}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"model": "other"}, 404, "not_found_error", "model"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        ({"tools": [{"name": "x", "type": "web_search_20250305"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"tools": [{"name": "x"}, {"name": "x"}]}, 400, "invalid_request_error", "tools[1].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
    ],
)
def test_errors_have_anthropics_shape_and_name_the_field(
    gateway: RunningGateway, fields: dict[str, Any], status: int, kind: str, param: str
) -> None:
    body = {"model": "fake-model", "max_tokens": 9, "messages": HI, **fields}
    got, answer = gateway.post("/v1/messages", body, {"x-api-key": "k"})
    assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind), answer
    assert answer["error"]["param"] == param
    assert ".function" not in answer["error"]["message"]


def test_a_prompt_that_is_longer_than_the_context_is_counted(gateway: RunningGateway) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 9000}]}
    status, answer = gateway.post("/v1/messages/count_tokens", body, {"x-api-key": "k"})
    assert status == 200 and answer["input_tokens"] > 9000
    assert gateway.post("/v1/messages", {**body, "max_tokens": 5}, {"x-api-key": "k"})[0] == 400


def test_the_key_is_taken_from_either_header(gateway: RunningGateway) -> None:
    body = {"max_tokens": 3, "messages": HI}
    assert gateway.post("/v1/messages", body, {"authorization": "Bearer k"})[0] == 200
    status, answer = gateway.post("/v1/messages", body, {"x-api-key": "wrong"})
    assert (status, answer["error"]["type"]) == (401, "authentication_error")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "high"}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_a_format_of_the_output_constrains_it(gateway: RunningGateway, fields: dict[str, Any]) -> None:
    body = {"max_tokens": 5, "messages": HI, **fields}
    status, answer = gateway.post("/v1/messages", body, {"x-api-key": "k"})
    assert status == 200, answer
    schema = gateway.engines[0].seen.requests[-1].sampling_params.json_schema
    assert schema is not None and json.loads(schema) == SCHEMA


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema"}, "output_config.format.schema"),
        ({"type": "other"}, "output_config.format.type"),
        ({}, "output_config.format.type"),
    ],
)
def test_a_format_that_says_nothing_is_named(gateway: RunningGateway, form: dict[str, Any], param: str) -> None:
    body = {"max_tokens": 5, "messages": HI, "output_config": {"format": form}}
    status, answer = gateway.post("/v1/messages", body, {"x-api-key": "k"})
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("edits", "status"),
    [
        ([], 200),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], 200),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}], 400),
        ([{"type": "clear_tool_uses_20250919"}], 400),
    ],
)
def test_edits_of_the_context_are_refused_unless_they_keep_all(
    gateway: RunningGateway, edits: list[Any], status: int
) -> None:
    body = {"max_tokens": 5, "messages": HI, "context_management": {"edits": edits}}
    assert gateway.post("/v1/messages", body, {"x-api-key": "k"})[0] == status
