# SPDX-License-Identifier: MIT
"""The Responses and Conversations APIs through the real server with the openai client, against a scripted engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.processes import wait_until
from tokenspeed.gateway.testing.fake_engine import END_TOKEN, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

ANSWER = (
    "<think>\nWhich city?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'
)
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]
FLAGS = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen", "--api-key", "k", "--api-key", "other"]


def sent_text(token_ids: list[int]) -> str:
    return bytes(token - 3 for token in token_ids if token > END_TOKEN).decode()


def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    prompt = sent_text(request.input_ids)
    if "[user]slow" in prompt:
        for _ in range(2000):
            yield Step(ids("z"), delay_s=0.01)
    text = "Hello there" if "[user]plain" in prompt else ANSWER
    yield from replying(ids(text), 1 if request.stream else 1000)(request)


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with RunningGateway([script], FLAGS) as running:
        yield running


def client_of(gateway: RunningGateway, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url("/v1"), api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> openai.OpenAI:
    return client_of(gateway, "k")


def shape(response: Any) -> list[tuple[object, ...]]:
    shapes: dict[str, Any] = {
        "reasoning": lambda item: ("reasoning", item.content[0].text),
        "message": lambda item: ("message", item.content[0].text),
        "function_call": lambda item: ("function_call", item.name, item.arguments),
    }
    assert all(item.status == "completed" for item in response.output)
    return [shapes[item.type](item) for item in response.output]


EXPECTED = [
    ("reasoning", "Which city?"),
    ("message", "Let me see."),
    ("function_call", "weather", '{"city": "Zürich 🙂"}'),
]


def test_a_whole_response_has_items_status_and_usage(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake-model", input="hi", tools=TOOLS, metadata={"a": "b"})
    assert shape(response) == EXPECTED
    assert (response.status, response.metadata, response.output_text) == ("completed", {"a": "b"}, "Let me see.")
    assert response.usage is not None and response.usage.output_tokens == len(ids(ANSWER)) + 1


def test_a_stream_has_the_whole_sequence_and_ends_with_the_same_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake-model", input="hi", tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    final: Any = events[-1]
    assert shape(final.response) == EXPECTED
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert [text, thought, arguments] == ["Let me see.", "Which city?", EXPECTED[2][2]]
    once = ["response.output_item.added", "response.output_item.done"]
    assert [kinds.count(kind) for kind in once] == [3, 3]
    assert kinds.count("response.content_part.added") == kinds.count("response.content_part.done") == 2
    stored = client.responses.retrieve(final.response.id)
    assert shape(stored) == EXPECTED


def test_a_response_goes_on_from_the_one_before(client: openai.OpenAI, gateway: RunningGateway) -> None:
    first = client.responses.create(model="fake-model", input="hi", tools=TOOLS, instructions="Be kind.")
    call: Any = first.output[2]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(model="fake-model", input=output, tools=TOOLS, previous_response_id=first.id)
    sent = sent_text(gateway.engines[0].seen.requests[-1].input_ids)
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'
    assert f"[user]hi[assistant]Let me see.\n{called}[user]<tool_response>\nsunny\n</tool_response>" in sent
    assert "Be kind." not in sent, "instructions hold for one response"
    client.responses.create(model="fake-model", input="plain", previous_response_id=second.id)
    sent = sent_text(gateway.engines[0].seen.requests[-1].input_ids)
    assert sent.count("[assistant]Let me see.") == 2 and sent.endswith("[user]plain[assistant]")
    items = client.responses.input_items.list(second.id).data
    assert [item.type for item in items] == ["function_call_output"]


def test_what_is_not_stored_or_was_deleted_is_not_found(client: openai.OpenAI) -> None:
    unstored = client.responses.create(model="fake-model", input="plain", store=False)
    stored = client.responses.create(model="fake-model", input="plain")
    client.responses.delete(stored.id)
    for response in (unstored, stored):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError) as error:
            client.responses.create(model="fake-model", input="x", previous_response_id=response.id)
        assert error.value.param == "previous_response_id"


def test_another_key_does_not_see_what_is_stored(client: openai.OpenAI, gateway: RunningGateway) -> None:
    response = client.responses.create(model="fake-model", input="plain")
    with pytest.raises(openai.NotFoundError):
        client_of(gateway, "other").responses.retrieve(response.id)


def test_a_response_cut_by_its_limit_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake-model", input="plain", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "Hel"


def wait_for(client: openai.OpenAI, response_id: str, statuses: tuple[str, ...]) -> Any:
    for _ in range(1000):
        response = client.responses.retrieve(response_id)
        if response.status in statuses:
            return response
        time.sleep(0.01)
    raise TimeoutError(response_id)


def test_a_background_response_is_fetched_when_it_is_done(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake-model", input="plain", background=True)
    assert response.status == "queued"
    assert wait_for(client, response.id, ("completed",)).output_text == "Hello there"


def test_a_background_response_can_be_cancelled_and_its_request_is_aborted(
    client: openai.OpenAI, gateway: RunningGateway
) -> None:
    response = client.responses.create(model="fake-model", input="slow", background=True)
    wait_until(lambda: gateway.engines[0].num_active == 1)
    assert client.responses.cancel(response.id).status == "cancelled"
    wait_until(lambda: gateway.engines[0].num_active == 0)
    assert client.responses.retrieve(response.id).status == "cancelled"
    finished = client.responses.create(model="fake-model", input="plain")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(finished.id)


def test_another_key_can_neither_cancel_nor_delete_what_runs(client: openai.OpenAI, gateway: RunningGateway) -> None:
    response = client.responses.create(model="fake-model", input="slow", background=True)
    other = client_of(gateway, "other")
    for end in (other.responses.delete, other.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            end(response.id)
    assert client.responses.retrieve(response.id).status in ("queued", "in_progress")
    assert client.responses.cancel(response.id).status == "cancelled"


def test_a_conversation_keeps_what_was_said_in_it(client: openai.OpenAI, gateway: RunningGateway) -> None:
    first: Any = [{"type": "message", "role": "user", "content": "plain one"}]
    conversation = client.conversations.create(items=first, metadata={"topic": "x"})
    client.responses.create(model="fake-model", input="two", conversation=conversation.id)
    sent = sent_text(gateway.engines[0].seen.requests[-1].input_ids)
    assert sent == "[user]plain one[user]two[assistant]"
    client.responses.create(model="fake-model", input="three", conversation={"id": conversation.id})
    sent = sent_text(gateway.engines[0].seen.requests[-1].input_ids)
    assert sent == "[user]plain one[user]two[assistant]Hello there[user]three[assistant]"
    items = client.conversations.items.list(conversation.id, order="asc", limit=2)
    assert items.has_more and len(items.data) == 2
    everything = [item.id for item in client.conversations.items.list(conversation.id, order="asc", limit=2)]
    assert len(everything) == len(set(everything)) == 5, "pages join to the whole"
    client.conversations.items.delete(everything[0], conversation_id=conversation.id)
    assert len(list(client.conversations.items.list(conversation.id))) == 4
    assert client.conversations.update(conversation.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "background": True, "stream": True}, "stream"),
        ({"input": "x", "background": True, "store": False}, "store"),
        ({"input": "x", "conversation": "c", "previous_response_id": "r"}, "conversation"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ],
)
def test_bad_fields_are_named(gateway: RunningGateway, fields: dict[str, Any], param: str) -> None:
    status, answer = gateway.post("/v1/responses", fields, {"authorization": "Bearer k"})
    assert status in (400, 404) and answer["error"]["param"] == param, answer


def test_a_text_format_constrains_the_output(client: openai.OpenAI, gateway: RunningGateway) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    client.responses.create(model="fake-model", input="plain", text={"format": form})
    sent = gateway.engines[0].seen.requests[-1].sampling_params.json_schema
    assert sent is not None and json.loads(sent)["properties"] == schema["properties"]


def test_keys_are_asked_for(gateway: RunningGateway) -> None:
    assert gateway.post("/v1/responses", {"input": "x"})[0] == 401
    assert gateway.get("/v1/responses/resp_x")[0] == 401


def test_background_responses_over_the_limit_get_429_and_one_that_ends_makes_room() -> None:
    with RunningGateway([script], ["--max-background-responses", "1"]) as gateway:
        slow = {"input": "slow", "background": True}
        status, first = gateway.post("/v1/responses", slow)
        assert status == 200
        status, answer = gateway.post("/v1/responses", slow)
        assert (status, answer["error"]["code"]) == (429, "too_many_background_responses")
        assert gateway.post(f"/v1/responses/{first['id']}/cancel", {})[1]["status"] == "cancelled"
        assert gateway.post("/v1/responses", slow)[0] == 200


def test_errors_of_tools_name_them_as_this_api_does(gateway: RunningGateway) -> None:
    body = {"input": "hi", "tools": [*TOOLS, *TOOLS]}
    status, answer = gateway.post("/v1/responses", body, {"x-api-key": "k"})
    assert (status, answer["error"]["param"]) == (400, "tools[1].name")
    assert "tools[1].name" in answer["error"]["message"]


def test_a_stored_response_is_not_said_to_be_streamed(gateway: RunningGateway, client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake-model", input="plain", tools=TOOLS)
    assert client.responses.retrieve(response.id, stream=False).id == response.id
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(response.id, stream=True)
    assert refused.value.param == "stream"
