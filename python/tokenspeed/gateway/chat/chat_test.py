# SPDX-License-Identifier: MIT
"""Chat and text completions through the real server with the openai client, against a scripted engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tokenspeed.config.sampling import derive_seed
from tokenspeed.gateway.testing.fake_engine import END_TOKEN, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids, token_id
from tokenspeed.rpc.lane.wire import TOP_K_OFF, TokenizedGenerateReqInput

ANSWER = "Paris, 안녕 🙂!"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def by_choice(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    """Each request of a fan-out gets another text: the last digit of its seed."""
    text = f"seed {request.sampling_params.seed}"
    yield from replying(ids(text))(request)


def by_prompt(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    """The prompt, backwards."""
    yield from replying(request.input_ids[::-1])(request)


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with RunningGateway([replying(ids(ANSWER))]) as running:
        yield running


def client_of(gateway: RunningGateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url("/v1"), api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> openai.OpenAI:
    return client_of(gateway)


def joined(chunks: Any, choice: int = 0) -> str:
    return "".join(
        c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == choice and c.delta is not None
    )


# ---- chat ------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_with_text_finish_reason_and_usage(gateway: RunningGateway, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake-model", messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "fake-model"
    sent = gateway.engines[0].seen.requests[-1]
    assert sent.input_ids == [*ids("[user]hi"), END_TOKEN, *ids("[assistant]")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(sent.input_ids)
    assert answer.usage.completion_tokens == len(ids(ANSWER)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_has_role_then_text_then_one_finish_then_usage_then_done(gateway: RunningGateway) -> None:
    body = {"model": "fake-model", "messages": MESSAGES, "stream_options": {"include_usage": True}}
    events = gateway.stream("/v1/chat/completions", body)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(ids(ANSWER)) + 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert finishes == [None] * (len(finishes) - 1) + ["stop"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == ANSWER
    assert not any("\ufffd" in event for event in events)


def test_a_stream_without_options_has_no_usage(gateway: RunningGateway) -> None:
    events = gateway.stream("/v1/chat/completions", {"messages": MESSAGES})
    assert all("usage" not in json.loads(event) for event in events[:-1])


def test_continuous_usage_counts_up_to_the_final_usage(gateway: RunningGateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = gateway.stream("/v1/chat/completions", {"messages": MESSAGES, "stream_options": options})
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == len(ids(ANSWER)) + 1


def test_every_sampling_field_reaches_the_engine(gateway: RunningGateway, client: openai.OpenAI) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "skip_special_tokens": False,
    }
    client.chat.completions.create(
        model="fake-model",
        messages=MESSAGES,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.3,
        presence_penalty=-0.4,
        logit_bias={"11": 3.0},
        seed=42,
        extra_body=extra,
    )
    sent = gateway.engines[0].seen.requests[-1].sampling_params
    assert (sent.max_new_tokens, sent.min_new_tokens) == (9, 2)
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sent.frequency_penalty, sent.presence_penalty, sent.repetition_penalty) == (0.3, -0.4, 1.2)
    assert (sent.logit_bias, sent.seed, sent.ignore_eos, sent.stop_token_ids) == ({11: 3.0}, 42, True, [7])
    assert (sent.skip_special_tokens, sent.n, sent.stop_strs, sent.is_normalized) == (False, 1, [], True)


def test_temperature_zero_travels_as_greedy_and_no_limit_as_the_room_that_is_left(
    gateway: RunningGateway, client: openai.OpenAI
) -> None:
    client.chat.completions.create(model="fake-model", messages=MESSAGES, temperature=0)
    sent = gateway.engines[0].seen.requests[-1]
    assert (sent.sampling_params.temperature, sent.sampling_params.top_k) == (1.0, 1)
    assert sent.sampling_params.max_new_tokens == 8192 - len(sent.input_ids)
    client.chat.completions.create(model="fake-model", messages=MESSAGES, temperature=0.7)
    assert gateway.engines[0].seen.requests[-1].sampling_params.top_k == TOP_K_OFF


def test_a_stop_string_ends_the_text_before_it_and_tells_the_engine(gateway: RunningGateway) -> None:
    for stream in (False, True):
        body = {"messages": MESSAGES, "stop": [", 안녕 🙂?", "안녕"], "max_tokens": 40}
        before = len(gateway.engines[0].seen.requests)
        if stream:
            events = [json.loads(event) for event in gateway.stream("/v1/chat/completions", body)[:-1]]
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            end = events[-1]["choices"][0]
        else:
            end = gateway.post("/v1/chat/completions", body)[1]["choices"][0]
            text = end["message"]["content"]
        assert text == "Paris, "
        assert (end["finish_reason"], end["matched_stop"]) == ("stop", "안녕")
        assert len(gateway.engines[0].seen.requests) == before + 1


def test_a_stop_string_may_stay_in_the_text(gateway: RunningGateway) -> None:
    body = {"messages": MESSAGES, "stop": "안녕", "include_stop_str_in_output": True}
    choice = gateway.post("/v1/chat/completions", body)[1]["choices"][0]
    assert choice["message"]["content"] == "Paris, 안녕"


def test_logprobs_come_with_bytes_and_alternatives_and_join_to_the_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake-model", messages=MESSAGES, logprobs=True, top_logprobs=2)
    stream = client.chat.completions.create(
        model="fake-model", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [
        entry
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    assert entries == streamed
    assert bytes(itertools.chain.from_iterable(entry.bytes or [] for entry in entries)).decode() == ANSWER
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in entries)


def test_logprobs_end_where_a_stop_string_cut_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake-model", messages=MESSAGES, logprobs=True, stop=["ris"])
    assert answer.choices[0].logprobs is not None
    assert [entry.token for entry in answer.choices[0].logprobs.content or []] == ["P", "a"]
    assert answer.choices[0].message.content == "Pa"


def test_a_length_limit_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake-model", messages=MESSAGES, max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Par", "length")


def test_text_parts_and_earlier_tool_calls_are_shown_to_the_template(gateway: RunningGateway) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    assert gateway.post("/v1/chat/completions", {"messages": messages})[0] == 200
    sent = gateway.engines[0].seen.requests[-1].input_ids
    end = [END_TOKEN]
    called = ids('[assistant]<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    result = ids("[user]<tool_response>\n42\n</tool_response>")
    assert sent == [*ids("[user]a\nb"), *end, *called, *end, *result, *end, *ids("[assistant]")]


def test_the_final_message_can_be_continued(gateway: RunningGateway) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True}
    assert gateway.post("/v1/chat/completions", body)[0] == 200
    sent = gateway.engines[0].seen.requests[-1].input_ids
    assert sent == [*ids("[user]hi"), END_TOKEN, *ids("[assistant]It is")]


def test_n_choices_differ_each_finish_once_and_use_derived_seeds() -> None:
    with RunningGateway([by_choice]) as gateway:
        client = client_of(gateway)
        whole = client.chat.completions.create(model="fake-model", messages=MESSAGES, n=4, seed=5)
        texts = [choice.message.content for choice in whole.choices]
        assert texts == [f"seed {derive_seed(5, i)}" for i in range(4)]
        rids = [request.rid for request in gateway.engines[0].seen.requests]
        assert [rid.rsplit("-", 1)[1] for rid in rids] == ["0", "1", "2", "3"]
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(gateway.engines[0].seen.requests[0].input_ids)
        chunks = list(client.chat.completions.create(model="fake-model", messages=MESSAGES, n=4, seed=5, stream=True))
        assert [joined(chunks, i) for i in range(4)] == texts
        finishes = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
        assert sorted(finishes) == [0, 1, 2, 3]
        free = client.chat.completions.create(model="fake-model", messages=MESSAGES, n=4)
        assert len({choice.message.content for choice in free.choices}) == 4


def test_cached_tokens_are_the_same_in_a_stream_and_in_a_whole_answer() -> None:
    def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        yield Step(ids("a"), cached=5)
        yield Step([END_TOKEN], "stop", cached=5)

    with RunningGateway([script]) as gateway:
        body = {"messages": MESSAGES, "stream_options": {"include_usage": True}}
        usage = json.loads(gateway.stream("/v1/chat/completions", body)[-2])["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
        assert gateway.post("/v1/chat/completions", {"messages": MESSAGES})[1]["usage"] == usage


@pytest.mark.parametrize("per_step", [1, 2, 3, 7, 40])
def test_the_answer_is_the_same_however_many_tokens_a_step_brings(per_step: int) -> None:
    text = "one two STO STOP three"
    with RunningGateway([replying(ids(text), per_step)]) as gateway:
        body: dict[str, Any] = {"messages": MESSAGES, "stop": ["STOP"], "logprobs": True}
        whole = gateway.post("/v1/chat/completions", body)[1]
        choice = whole["choices"][0]
        assert choice["message"]["content"] == "one two STO "
        assert len(choice["logprobs"]["content"]) == len("one two STO ")
        assert whole["usage"]["completion_tokens"] == len("one two STO STOP")
        events = [json.loads(event) for event in gateway.stream("/v1/chat/completions", body)[:-1]]
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "one two STO "


# ---- completions -----------------------------------------------------------------------------------------------


def test_a_prompt_may_be_text_texts_ids_or_lists_of_ids() -> None:
    with RunningGateway([by_prompt]) as gateway:
        client = client_of(gateway)
        for prompt, texts in (
            ("abc", ["cba"]),
            (["abc", "xy"], ["cba", "yx"]),
            (ids("abc"), ["cba"]),
            ([ids("abc"), ids("xy")], ["cba", "yx"]),
        ):
            answer = client.completions.create(model="fake-model", prompt=prompt)
            assert [choice.text for choice in answer.choices] == texts
            assert [choice.index for choice in answer.choices] == list(range(len(texts)))
        stream = client.completions.create(model="fake-model", prompt=["abc", "xy"], n=2, stream=True)
        got = [""] * 4
        for chunk in stream:
            for choice in chunk.choices:
                got[choice.index] += choice.text
        assert got == ["cba", "cba", "yx", "yx"]


def test_echo_puts_the_prompt_before_the_text(gateway: RunningGateway, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="Q: ", echo=True, max_tokens=5)
    assert answer.choices[0].text == "Q: Paris"
    events = gateway.stream("/v1/completions", {"prompt": ids("Q: "), "echo": True, "max_tokens": 5})
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "Q: Paris"


def test_completions_stop_after_sixteen_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="x")
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_the_default_length_is_cut_to_the_room_that_a_prompt_leaves(gateway: RunningGateway) -> None:
    for length, expected in ((8191, 1), (8185, 7)):
        status, answer = gateway.post("/v1/completions", {"prompt": [token_id(65)] * length})
        assert (status, answer["usage"]["completion_tokens"]) == (200, expected)
    assert gateway.post("/v1/completions", {"prompt": [token_id(65)] * 8192})[0] == 400


@pytest.mark.parametrize("stop", [None, ["ris"]])
def test_token_ids_come_beside_the_text_whole_and_streamed(gateway: RunningGateway, stop: list[str] | None) -> None:
    asked = {"return_token_ids": True, "max_tokens": 5, "stop": stop}
    _, whole = gateway.post("/v1/completions", {"prompt": "Q: ", **asked})
    choice = whole["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids("Q: "), ids("Paris"))
    events = [json.loads(e) for e in gateway.stream("/v1/completions", {"prompt": "Q: ", **asked})[:-1]]
    deltas = [event["choices"][0] for event in events]
    assert deltas[0]["prompt_token_ids"] == ids("Q: ")
    assert [i for delta in deltas for i in delta.get("token_ids", [])] == ids("Paris")
    _, chat = gateway.post("/v1/chat/completions", {"messages": MESSAGES, **asked})
    assert chat["choices"][0]["token_ids"] == ids("Paris") and chat["prompt_token_ids"]
    events = [json.loads(e) for e in gateway.stream("/v1/chat/completions", {"messages": MESSAGES, **asked})[:-1]]
    assert events[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [i for e in events for i in e["choices"][0].get("token_ids", [])] == ids("Paris")


def test_completion_logprobs_are_columns_with_offsets(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="x", logprobs=1, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["P", "a", "r"], [0, 1, 2])
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.top_logprobs == [{"P": -0.5}, {"a": -0.5}, {"r": -0.5}]


def test_best_of_answers_the_candidates_with_the_most_probable_tokens() -> None:
    with RunningGateway([by_choice]) as gateway:
        body = {"prompt": "x", "best_of": 3, "n": 2, "seed": 1, "max_tokens": 100}
        status, answer = gateway.post("/v1/completions", body)
        assert status == 200
        # All are equally probable here: the first two stay.
        assert [c["text"] for c in answer["choices"]] == [f"seed {derive_seed(1, i)}" for i in range(2)]
        assert len(gateway.engines[0].seen.requests) == 3
        assert all(request.return_logprob for request in gateway.engines[0].seen.requests)


def test_tokenize_and_detokenize_are_inverse(gateway: RunningGateway) -> None:
    status, answer = gateway.post("/v1/tokenize", {"prompt": "héy"})
    assert (status, answer["tokens"], answer["count"]) == (200, ids("héy"), 4)
    assert gateway.post("/v1/detokenize", {"tokens": answer["tokens"]}) == (200, {"text": "héy"})
    assert gateway.post("/v1/detokenize", {"tokens": [10**6]})[0] == 400


# ---- what is refused -------------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {"messages": MESSAGES}
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "unsupported_content",
    ),
    (CHAT | {"temperature": -1}, "temperature", "invalid_value"),
    (CHAT | {"temperature": "hot"}, "temperature", "invalid_type"),
    (CHAT | {"top_p": 0}, "top_p", "invalid_value"),
    (CHAT | {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT | {"max_completion_tokens": -3}, "max_completion_tokens", "invalid_value"),
    (CHAT | {"max_tokens": 4, "min_tokens": 5}, "min_tokens", "invalid_value"),
    (CHAT | {"n": 0}, "n", "invalid_value"),
    (CHAT | {"stop": [""]}, "stop", "invalid_value"),
    (CHAT | {"stop": 5}, "stop", "invalid_type"),
    (CHAT | {"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
    (CHAT | {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    (CHAT | {"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT | {"seed": 2**70}, "seed", "invalid_value"),
    (CHAT | {"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    (CHAT | {"model": "gpt-9"}, "model", "model_not_found"),
    (CHAT | {"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "invalid_type"),
    (CHAT | {"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    (CHAT | {"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
    (CHAT | {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (CHAT | {"guided_json": {"not": {}}}, "guided_json", "invalid_schema"),
    (CHAT | {"guided_json": {"type": "not-a-type"}}, "guided_json", "invalid_schema"),
    (CHAT | {"guided_json": {"$ref": "#"}}, "guided_json", "invalid_schema"),
    (CHAT | {"json_schema": "{"}, "json_schema", "invalid_schema"),
    (CHAT | {"regex": "(a"}, "regex", "invalid_regex"),
    (CHAT | {"regex": "(?=a)b"}, "regex", "invalid_regex"),
    (CHAT | {"guided_choice": []}, "guided_choice", "invalid_value"),
    (CHAT | {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "conflicting_parameters"),
    (CHAT | {"regex": "a", "response_format": {"type": "json_object"}}, "regex", "conflicting_parameters"),
    (
        CHAT | {"structured_outputs": {"whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "unsupported_parameter",
    ),
    (CHAT | {"structural_tag": {"structures": []}}, "structural_tag", "invalid_structural_tag"),
    (CHAT | {"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "unsupported_parameter"),
    (CHAT | {"allowed_token_ids": [-1]}, "allowed_token_ids", "invalid_value"),
    (CHAT | {"bad_words": [""]}, "bad_words", "invalid_value"),
    (CHAT | {"bad_words_ids": [[]]}, "bad_words_ids", "invalid_value"),
    (CHAT | {"logits_processors": ["x"]}, "logits_processors", "unsupported_parameter"),
    (CHAT | {"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    (CHAT | {"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "context_length_exceeded"),
    (CHAT | {"max_tokens": 8192}, "messages", "context_length_exceeded"),
]


@pytest.mark.parametrize(("body", "param", "code"), BAD_CHATS)
def test_a_bad_chat_is_refused_with_field_and_code_before_any_work(
    gateway: RunningGateway, body: dict[str, Any], param: str, code: str
) -> None:
    before = len(gateway.engines[0].seen.requests)
    for stream in (False, True):
        status, answer = gateway.post("/v1/chat/completions", {**body, "stream": stream})
        assert status == (404 if code == "model_not_found" else 400)
        assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)
        assert answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
    assert len(gateway.engines[0].seen.requests) == before
    assert gateway.post("/v1/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
        ({"prompt": [[]]}, "prompt", "empty_prompt"),
        ({"prompt": [999_999]}, "prompt", "invalid_token_id"),
        ({"prompt": [[1], 2]}, "prompt", "invalid_type"),
        # What is too long by far is not looked into, and not spelled for an echo.
        ({"prompt": [999_999] * 9000, "echo": True}, "prompt", "context_length_exceeded"),
        ({"prompt": "x", "stop_token_ids": [5] * 9000}, "stop_token_ids", "invalid_value"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "unsupported_parameter"),
        ({"prompt": "x", "prompt_logprobs": 1, "logprobs": 2}, "prompt_logprobs", "invalid_value"),
        ({"prompt": "x", "prompt_logprobs": 99}, "prompt_logprobs", "invalid_value"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of", "invalid_value"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", "invalid_value"),
        ({"prompt": "x", "logprobs": -1}, "logprobs", "invalid_value"),
        ({"prompt": "\ud800"}, "prompt", "invalid_json"),
    ],
)
def test_a_bad_completion_is_refused_with_field_and_code(
    gateway: RunningGateway, body: dict[str, Any], param: str, code: str
) -> None:
    status, answer = gateway.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, code)
    assert answer["error"]["param"] == (None if code == "invalid_json" else param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"messages": NaN}', b"[" * 5000])
def test_a_body_that_is_no_json_object_is_refused(gateway: RunningGateway, body: bytes) -> None:
    status, answer = gateway.post("/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")


def test_fields_that_ask_for_nothing_and_fields_that_nobody_knows_are_let_through(gateway: RunningGateway) -> None:
    body = CHAT | {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "logprobs": None,
        "something_new": 1,
    }
    assert gateway.post("/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize("length", [8191, 8192, 8193])
@pytest.mark.parametrize("max_tokens", [None, 1, 2])
def test_the_context_limit_is_exact_and_the_message_names_what_does_not_fit(
    gateway: RunningGateway, length: int, max_tokens: int | None
) -> None:
    body: dict[str, Any] = {"prompt": [token_id(65)] * length, "max_tokens": max_tokens or 1}
    if max_tokens is None:
        body = {"messages": [{"role": "user", "content": "x" * (length - len("[user][assistant]") - 1)}]}
    path = "/v1/chat/completions" if max_tokens is None else "/v1/completions"
    status, answer = gateway.post(path, body)
    if length + (max_tokens or 1) <= 8192:
        assert status == 200
    else:
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "8192" in answer["error"]["message"] and str(length) in answer["error"]["message"]
