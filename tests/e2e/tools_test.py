# SPDX-License-Identifier: MIT
"""An agent's loop with tools through the whole path, by both of OpenAI's APIs and by Anthropic's.

The embedded model is too small to decide by itself when to call, so the loop forces its calls; names, arguments, ids
and history are those of a real loop.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai

from tests.support.server import Server

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
NUM_TURNS = 5


def check_arguments(text: str) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(text)
    assert arguments["city"] in ("Paris", "Rome", "Oslo") and 1 <= arguments["days"] <= 9
    return arguments


def run_turn(client: openai.OpenAI, model: str, messages: list[Any], turn: int) -> tuple[list[Any], int]:
    """One call and its result; (the longer conversation, cached tokens). Odd turns are streamed."""
    args: Any = {"model": model, "messages": messages, "tools": TOOLS, "tool_choice": "required", "seed": turn}
    args |= {"parallel_tool_calls": False, "max_tokens": 200}
    if turn % 2:
        with client.chat.completions.stream(**args, stream_options={"include_usage": True}) as stream:
            answer = stream.get_final_completion()
    else:
        answer = client.chat.completions.create(**args)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "weather"
    city = check_arguments(call.function.arguments)["city"]
    function = {"name": call.function.name, "arguments": call.function.arguments}
    turns: list[Any] = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"},
    ]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return [*messages, *turns], answer.usage.prompt_tokens_details.cached_tokens or 0


def test_five_turns_of_calls_and_results_then_an_answer(client: openai.OpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    cached = []
    for turn in range(NUM_TURNS):
        messages, num_cached = run_turn(client, model, messages, turn)
        cached.append(num_cached)
    assert cached == sorted(cached) and cached[-1] > 0, "each turn finds the ones before in the cache"
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=20)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_the_same_loop_by_the_responses_api(client: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    given: Any = "What is the weather in Paris?"
    previous: str | None = None
    for _ in range(3):
        response = client.responses.create(
            model=model,
            input=given,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            previous_response_id=previous,
            max_output_tokens=200,
        )
        (call,) = (item for item in response.output if item.type == "function_call")
        check_arguments(call.arguments)
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        previous = response.id


def test_the_same_loop_by_the_messages_api(server: Server, model: str) -> None:
    client = anthropic.Anthropic(base_url=server.base_url, api_key="unused", max_retries=0)
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    for _ in range(3):
        answer = client.messages.create(
            model=model, max_tokens=200, messages=messages, tools=tools, tool_choice={"type": "tool", "name": "weather"}
        )
        assert answer.stop_reason == "tool_use"
        (call,) = (block for block in answer.content if block.type == "tool_use")
        check_arguments(json.dumps(call.input))
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
