# SPDX-License-Identifier: MIT
"""Tool calls and reasoning through the real server with the openai client, against a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tokenspeed.gateway.testing.fake_engine import Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

CALLS = (
    "<think>\nWhich city?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
FLAGS = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen"]


def whole_or_in_bits(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    """One byte a step when streamed, all at once when not: the results must not differ."""
    yield from replying(ids(CALLS), 1 if request.stream else 1000)(request)


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with RunningGateway([whole_or_in_bits], FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url("/v1"), api_key="none", max_retries=0)


def shape(message: Any) -> tuple[object, ...]:
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    return message.content, getattr(message, "reasoning_content", None), calls


EXPECTED = ("Let me see.", "Which city?", [("weather", {"city": "Zürich 🙂"}), ("now", {})])


def test_reasoning_content_and_calls_of_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake-model", messages=MESSAGES, tools=TOOLS)
    choice = answer.choices[0]
    assert shape(choice.message) == EXPECTED
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call_ids = [call.id for call in choice.message.tool_calls]
    assert len(set(call_ids)) == 2 and all(call_id.startswith("call_") for call_id in call_ids)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(ids("Which city?")) + 1


def test_a_stream_joins_to_the_same_message_with_one_finish_a_choice(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake-model", messages=MESSAGES, tools=TOOLS, n=2) as stream:
        reasoning = {0: "", 1: ""}
        finishes: dict[int, list[str]] = {0: [], 1: []}
        for event in stream:
            if event.type != "chunk":
                continue
            for choice in event.chunk.choices:
                reasoning[choice.index] += getattr(choice.delta, "reasoning_content", None) or ""
                if choice.finish_reason:
                    finishes[choice.index].append(choice.finish_reason)
        final = stream.get_final_completion()
    for choice in final.choices:
        content, _, calls = shape(choice.message)
        assert (content, reasoning[choice.index], calls) == EXPECTED
        assert finishes[choice.index] == ["tool_calls"]


def test_the_first_delta_of_a_call_has_index_id_type_and_name_and_later_ones_only_arguments(
    gateway: RunningGateway,
) -> None:
    events = gateway.stream("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS})
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    for index, name in ((0, "weather"), (1, "now")):
        first, *others = [call for call in calls if call["index"] == index]
        assert first["type"] == "function" and first["function"] == {"name": name, "arguments": ""} and first["id"]
        assert others and all(set(call) == {"index", "function"} for call in others)
        assert all(set(call["function"]) == {"arguments"} for call in others)


def test_parallel_calls_can_be_turned_off(client: openai.OpenAI) -> None:
    for stream in (False, True):
        body: Any = {"model": "fake-model", "messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
        if stream:
            with client.chat.completions.stream(**body) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**body).choices[0].message
        assert shape(message)[2] == [("weather", {"city": "Zürich 🙂"})]


def test_without_tools_or_with_choice_none_calls_are_text(client: openai.OpenAI, gateway: RunningGateway) -> None:
    text = CALLS.split("</think>\n\n")[1]
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(model="fake-model", messages=MESSAGES, **extra).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert gateway.engines[0].seen.requests[-1].input_ids[: len(ids("[user]"))] == ids("[user]")


def test_reasoning_can_be_left_in_the_content_or_be_given_whole(gateway: RunningGateway) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "separate_reasoning": False}
    message = gateway.post("/v1/chat/completions", body)[1]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALLS}
    events = gateway.stream("/v1/chat/completions", {"messages": MESSAGES, "stream_reasoning": False})
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["Which city?"]


def test_tools_and_their_history_reach_a_template_that_knows_none(gateway: RunningGateway) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    assert gateway.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})[0] == 200
    sent = bytes(token - 3 for token in gateway.engines[0].seen.requests[-1].input_ids if token > 2).decode()
    assert sent.startswith("[system]Be kind.\n\nYou can call functions.")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in sent
    assert '[assistant]<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>' in sent
    assert "[user]<tool_response>\nsunny\n</tool_response>[assistant]" in sent


def test_an_open_think_block_of_the_prompt_makes_the_answer_begin_as_reasoning(gateway: RunningGateway) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nFirst"}]
    body = {"messages": messages, "continue_final_message": True}
    message = gateway.post("/v1/chat/completions", body)[1]["choices"][0]["message"]
    assert message["reasoning_content"] == "Which city?", "the model's own marker is not shown twice"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_bad_tools_are_named(gateway: RunningGateway, fields: dict[str, Any], param: str) -> None:
    status, answer = gateway.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer


def _allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}


@pytest.mark.parametrize("stream", [False, True])
def test_only_allowed_tools_are_called_and_all_are_shown(gateway: RunningGateway, stream: bool) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": _allowed("auto", "now")}
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    if stream:
        deltas = [
            json.loads(event)["choices"][0]["delta"] for event in gateway.stream("/v1/chat/completions", body)[:-1]
        ]
        names = [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", []) if call.get("id")]
    else:
        message = gateway.post("/v1/chat/completions", body)[1]["choices"][0]["message"]
        names = [call["function"]["name"] for call in message["tool_calls"]]
        assert "weather" in message["content"]
    assert names == ["now"]
    sent = gateway.engines[0].seen.requests[-1]
    whole = gateway.post("/v1/chat/completions", {**body, "tool_choice": "auto"})
    assert whole[0] == 200
    assert gateway.engines[0].seen.requests[-1].input_ids == sent.input_ids


def test_a_call_of_an_allowed_tool_can_be_required(gateway: RunningGateway) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": _allowed("required", "now")}
    gateway.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice})
    schema = gateway.engines[0].seen.requests[-1].sampling_params.json_schema
    assert schema is not None and "now" in schema and "weather" not in schema
    responses = [{"type": "function", "name": tool["function"]["name"]} for tool in TOOLS]
    flat = {"type": "allowed_tools", "mode": "required", "tools": responses[1:]}
    status, answer = gateway.post("/v1/responses", {"input": "hi", "tools": responses, "tool_choice": flat})
    assert (status, answer["tool_choice"]) == (200, flat)
    assert gateway.engines[0].seen.requests[-1].sampling_params.json_schema == schema


@pytest.mark.parametrize("names", [(), ("nope",), ("now", "nope")])
def test_allowed_tools_are_among_the_tools(gateway: RunningGateway, names: tuple[str, ...]) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": _allowed("auto", *names)}
    status, answer = gateway.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice})
    assert (status, answer["error"]["param"]) == (400, "tool_choice")
