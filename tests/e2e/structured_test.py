# SPDX-License-Identifier: MIT
"""Constrained output through the whole path: every way to ask for it, many streams at once, and bad constraints."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import openai
import pytest

from tests.support.server import Server

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad"]},
    },
    "required": ["name", "age", "mood"],
}
ASK = [{"role": "user", "content": "Describe a person as JSON."}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city"],
            },
        },
    }
]


def is_person(text: str | None) -> bool:
    return jsonschema_rs.Draft202012Validator(PERSON).is_valid(json.loads(text or ""))


def streamed(stream: Any) -> tuple[str, str | None]:
    text, finish = "", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


def test_32_constrained_streams_at_once_are_all_valid_and_each_is_its_own_single_run(
    client: openai.OpenAI, model: str
) -> None:
    def run(seed: int) -> tuple[str, str | None]:
        args: Any = {"temperature": 1.0, "seed": seed, "max_tokens": 160, "stream": True}
        return streamed(client.chat.completions.create(model=model, messages=ASK, response_format=FORMAT, **args))

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(run, range(32)))
    whole = [text for text, finish in answers if finish == "stop"]
    assert len(whole) >= 28, [text for text, finish in answers if finish != "stop"]
    assert all(map(is_person, whole))
    assert len(set(whole)) > 20
    assert [run(seed) for seed in (0, 7)] == [answers[0], answers[7]]


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"regex": "[a-f]{4}-[0-9]{2}"}, "[a-f]{4}-[0-9]{2}"),
        ({"guided_regex": "(yes|no)!"}, "(yes|no)!"),
        ({"guided_choice": ["red pill", "blue pill"]}, "(red|blue) pill"),
        ({"ebnf": "root ::= digit digit\ndigit ::= [0-9]"}, "[0-9]{2}"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "a|b"),
        ({"structured_outputs": {"grammar": 'root ::= "ok" | "ko"'}}, "ok|ko"),
        (
            {
                "structural_tag": {
                    "format": {
                        "type": "tag",
                        "begin": "<n>",
                        "content": {"type": "regex", "pattern": "[0-9]{3}"},
                        "end": "</n>",
                    }
                }
            },
            "<n>[0-9]{3}</n>",
        ),
        ({"stop": ["7"], "regex": "[0-9]{6}"}, "[0-689]{0,6}"),
        ({"regex": "ab", "min_tokens": 20, "ignore_eos": True}, "ab"),
    ],
    ids=lambda value: str(value)[:32],
)
def test_every_name_of_a_constraint_is_honoured(
    client: openai.OpenAI, model: str, extra: dict[str, Any], pattern: str
) -> None:
    for temperature in (0.0, 1.0):
        answer = client.chat.completions.create(
            model=model, messages=ASK, temperature=temperature, seed=5, max_tokens=40, n=2, extra_body=extra
        )
        for choice in answer.choices:
            assert re.fullmatch(pattern, choice.message.content or ""), choice
            assert choice.finish_reason == "stop"


def test_json_objects_and_logprobs_of_constrained_tokens(client: openai.OpenAI, model: str) -> None:
    args: Any = {"logprobs": True, "top_logprobs": 2, "temperature": 0, "max_tokens": 100}
    answer = client.chat.completions.create(model=model, messages=ASK, response_format=FORMAT, **args)
    assert is_person(answer.choices[0].message.content)
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content and all(entry.logprob <= 0 for entry in content)
    loose = client.completions.create(
        model=model, prompt="JSON: ", max_tokens=4, extra_body={"response_format": {"type": "json_object"}}
    )
    assert loose.choices[0].text.lstrip().startswith("{")


def test_a_forced_tool_is_called_with_arguments_that_its_schema_allows(client: openai.OpenAI, model: str) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        args: Any = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "seed": 3, "max_tokens": 150}
        answer = client.chat.completions.create(model=model, messages=ASK, parallel_tool_calls=False, **args)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather"
        parameters = TOOLS[0]["function"]["parameters"]
        assert jsonschema_rs.Draft202012Validator(parameters).is_valid(json.loads(call.function.arguments))


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"json_schema": {"type": "not-a-type"}}, "json_schema", "invalid_schema"),
        ({"json_schema": {"$ref": "#"}}, "json_schema", "invalid_schema"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json", "invalid_schema"),
        ({"regex": "(unclosed"}, "regex", "invalid_regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "conflicting_parameters"),
        ({"ebnf": "root ::= missing"}, "ebnf", "grammar_error"),
        ({"ebnf": "root ::= root"}, "ebnf", "grammar_error"),
        ({"guided_regex": "[^\\s\\S]"}, "guided_regex", "invalid_regex"),
        ({"structural_tag": {"format": {"type": "no_such_format"}}}, "structural_tag", "grammar_error"),
        ({"custom_logit_processor": "{}"}, "custom_logit_processor", "unsupported"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice", "conflicting_parameters"),
    ],
    ids=lambda value: str(value)[:32],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_constraint_is_400_and_the_next_request_works(
    server: Server, extra: dict[str, Any], param: str | None, code: str, stream: bool
) -> None:
    status, body = server.post("/v1/chat/completions", {"messages": ASK, "stream": stream, "max_tokens": 8, **extra})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, code, param), body
    status, body = server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 8, "regex": "ok"})
    assert (status, body["choices"][0]["message"]["content"]) == (200, "ok")


def test_an_output_that_its_constraint_leads_to_a_dead_end_is_an_error_and_no_answer(
    server: Server, client: openai.OpenAI, model: str
) -> None:
    grammar = 'root ::= "a" [^\\0-\\U0010ffff]'
    body = {"messages": ASK, "structured_outputs": {"grammar": grammar}}
    status, answer = server.post("/v1/chat/completions", body)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "grammar_dead_end", "structured_outputs.grammar"), answer
    with pytest.raises(openai.APIError, match="no token of this model's vocabulary continues"):
        list(client.completions.create(model=model, prompt="x", stream=True, extra_body={"ebnf": grammar}))
    assert server.post("/v1/completions", {"prompt": "x", "regex": "ok"})[1]["choices"][0]["text"] == "ok"


def test_a_pathological_expression_ends_and_harms_nobody(server: Server) -> None:
    for regex in ("^(|.*)$", "(a*)*" * 50, "((a?){50}){50}", "(x{1,300}){1,300}"):
        status, _ = server.post("/v1/completions", {"prompt": "x", "regex": regex, "max_tokens": 4})
        assert status in (200, 400)
    assert server.status("/readiness") == 200


def test_allowed_and_bad_tokens_are_honoured(client: openai.OpenAI, model: str) -> None:
    args: Any = {"model": model, "prompt": "One, two,", "temperature": 1.0, "seed": 2, "max_tokens": 24}
    ids = {"return_token_ids": True, "ignore_eos": True}
    only = client.completions.create(**args, extra_body={"allowed_token_ids": [33, 34, 40], **ids})
    assert set((only.choices[0].model_extra or {})["token_ids"]) <= {33, 34, 40}
    plain = client.completions.create(**{**args, "temperature": 0}, extra_body=ids).choices[0].text
    word = plain.split()[0].strip(",.")
    without = client.completions.create(**{**args, "temperature": 0}, extra_body={"bad_words": [word], **ids})
    assert word in plain and f" {word}" not in without.choices[0].text


def test_a_grammar_whose_parser_goes_exponential_ends_alone(server: Server) -> None:
    tokens = server.post("/v1/tokenize", {"prompt": "a"})[1]["tokens"]
    body = {
        "prompt": "aaaaaa",
        "ebnf": 'root ::= (("a"{0,1000}){0,1000}){0,1000} "b"',
        "logit_bias": {str(tokens[0]): 100},
        "max_tokens": 200,
    }
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.post, "/v1/completions", {"prompt": "x", "max_tokens": 4, "ignore_eos": True})
        status, answer = server.post("/v1/completions", body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "grammar_too_costly", "ebnf"), answer
    assert other.result()[0] == 200
    assert server.post("/v1/completions", {"prompt": "x", "regex": "ok"})[1]["choices"][0]["text"] == "ok"
