# SPDX-License-Identifier: MIT
"""`/generate` and `/parse/*` through the real server, against a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed.gateway.testing.fake_engine import END_TOKEN, WEIGHT_VERSION, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput


def echo(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    for step in replying(request.input_ids[::-1])(request):
        yield Step(step.tokens, step.finish, cached=len(request.input_ids) - 1)


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with RunningGateway([echo]) as running:
        yield running


def test_one_text_is_answered_by_one_object(gateway: RunningGateway) -> None:
    body = {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 9}, "rid": "mine"}
    status, answer = gateway.post("/generate", body)
    assert status == 200
    assert (answer["text"], answer["output_ids"]) == ("cba", [*ids("cba"), END_TOKEN])
    info = answer["meta_info"]
    assert info["id"] == "mine"
    assert info["finish_reason"] == {"type": "stop", "matched": END_TOKEN}
    assert (info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"]) == (3, 4, 2)
    assert info["e2e_latency"] > 0
    assert info["weight_version"] == WEIGHT_VERSION
    assert gateway.engines[0].seen.requests[-1].sampling_params.max_new_tokens == 9


def test_lists_and_choices_are_answered_by_lists(gateway: RunningGateway) -> None:
    def ask(body: dict[str, Any]) -> list[Any]:
        return json.loads(gateway.request("POST", "/generate", body)[2])

    answer = ask({"input_ids": [ids("ab"), ids("xyz")], "sampling_params": {"n": 2}})
    assert [(item["index"], item["text"]) for item in answer] == [(0, "ba"), (1, "ba"), (2, "zyx"), (3, "zyx")]
    assert [item["meta_info"]["cached_tokens"] for item in answer] == [1, 1, 2, 2]
    assert [item["text"] for item in ask({"text": ["a"]})] == ["a"]


def test_a_stream_tells_the_text_so_far_and_ends_with_the_whole_answer(gateway: RunningGateway) -> None:
    body = {"text": "abc", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    events = gateway.stream("/generate", body)
    assert events[-1] == "[DONE]"
    objects = [json.loads(event) for event in events[:-1]]
    assert {item["meta_info"]["weight_version"] for item in objects} == {WEIGHT_VERSION}
    texts = [item["text"] for item in objects]
    assert texts == sorted(texts, key=len) and texts[-1] == "cba"
    _, whole = gateway.post("/generate", body)
    for item in (objects[-1], whole):
        item["meta_info"].pop("e2e_latency")
        item["meta_info"].pop("id")
    assert objects[-1] == whole
    info = whole["meta_info"]
    assert info["output_token_logprobs"][0] == [-0.5, ids("c")[0], "c"]
    assert [len(top) for top in info["output_top_logprobs"]] == [2] * len(info["output_token_logprobs"])


def test_named_tokens_have_their_logprobs_beside_the_likeliest(gateway: RunningGateway) -> None:
    body = {"text": "abc", "return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [9, 5]}
    status, answer = gateway.post("/generate", body)
    assert status == 200, answer
    assert gateway.engines[0].seen.requests[-1].token_ids_logprob == [9, 5]
    info = answer["meta_info"]
    assert [len(top) for top in info["output_top_logprobs"]] == [2] * len(info["output_token_logprobs"])
    assert info["output_token_ids_logprobs"] == [[[-2.5, 9, None], [-3.5, 5, None]]] * len(info["output_top_logprobs"])
    last = json.loads(gateway.stream("/generate", body)[-2])["meta_info"]
    assert last["output_token_ids_logprobs"] == info["output_token_ids_logprobs"]
    plain = gateway.post("/generate", {"text": "abc", "return_logprob": True})[1]["meta_info"]
    assert "output_token_ids_logprobs" not in plain


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [999999]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"beam_width": 3}}, "sampling_params.beam_width"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [999999]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [5] * 1000}, "token_ids_logprob"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": "x"}, "token_ids_logprob"),
        ({"text": "a", "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ],
)
def test_bad_fields_are_named(gateway: RunningGateway, body: dict[str, Any], param: str) -> None:
    status, answer = gateway.post("/generate", body)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_texts_can_be_parsed_alone(gateway: RunningGateway) -> None:
    text = 'Yes.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"text": text, "tools": tools, "tool_call_parser": "hermes"}
    expected: dict[str, Any] = {"normal_text": "Yes.", "calls": [{"name": "f", "parameters": '{"a": 1}'}]}
    assert gateway.post("/parse/function_call", body) == (200, expected)
    body = {"text": "<think>hm</think>Yes.", "reasoning_parser": "deepseek_r1"}
    assert gateway.post("/parse/reasoning", body) == (200, {"text": "Yes.", "reasoning_text": "hm"})
    status, answer = gateway.post("/parse/reasoning", {"text": "", "reasoning_parser": "nobody"})
    assert (status, answer["error"]["param"]) == (400, "reasoning_parser")
    assert gateway.post("/parse/reasoning", {"text": "plain"}) == (200, {"text": "plain", "reasoning_text": ""})


def test_preferred_parameters_are_for_requests_that_do_not_say_them() -> None:
    preferred = ["--preferred-sampling-params", '{"temperature": 0.25, "top_k": 7, "presence_penalty": 0.5}']
    with RunningGateway([echo], preferred) as running:
        messages = [{"role": "user", "content": "hi"}]
        for path, body in (("/v1/chat/completions", {"messages": messages}), ("/generate", {"text": "hi"})):
            knobs = {"temperature": 0.75, "top_k": 3}
            asked = {"sampling_params": knobs} if path == "/generate" else knobs
            for more, want in (({}, (0.25, 7, 0.5)), (asked, (0.75, 3, 0.5))):
                assert running.post(path, {**body, **more})[0] == 200
                sent = running.engines[0].seen.requests[-1].sampling_params
                assert (sent.temperature, sent.top_k, sent.presence_penalty) == want


def test_long_texts_are_parsed_in_pieces_and_longer_ones_are_refused(gateway: RunningGateway) -> None:
    status, answer = gateway.post("/parse/reasoning", {"text": "x" * 1_048_577})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "text", "string_above_max_length")
    long = "word <tool_call> " * 5000
    asked = {"text": long, "reasoning_parser": "qwen3"}
    assert gateway.post("/parse/reasoning", asked) == (200, {"text": long, "reasoning_text": ""})
