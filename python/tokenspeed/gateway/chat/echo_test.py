# SPDX-License-Identifier: MIT
"""Logprobs of an echoed prompt: where its tokens begin, and the same columns whole and in a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.gateway.chat.choice import Piece, TokenLogprob
from tokenspeed.gateway.chat.format import CompletionFormat, Head, PromptScore, Usage, UsageOptions
from tokenspeed.gateway.testing.fake_engine import END_TOKEN, replying
from tokenspeed.gateway.testing.running import END, RunningGateway, ids, write_tokenizer
from tokenspeed.gateway.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def usage() -> Usage:
    return Usage(3, 1, [0], None)


def scored(token_ids: list[int], top: tuple[tuple[int, float], ...]) -> list[PromptScore]:
    return [PromptScore(token_ids[0], None, ()), *(PromptScore(token, -1.0, top) for token in token_ids[1:])]


def columns(tokenizer: Tokenizer, echo: str, scores: list[PromptScore], num_top: int) -> list[dict[str, Any]]:
    """Those of a whole answer "x", and those of the same answer streamed, joined."""
    token = ids("x")[0]
    piece = Piece("x", [TokenLogprob(token, -2.0, ((token, -2.0),) * bool(num_top), 0)], "length", None, [token], ())

    def form() -> CompletionFormat:
        usages = UsageOptions(False, False)
        made = CompletionFormat(Head("c", 0, "m"), tokenizer, usages, num_top, [echo], None, 1, False)
        made.score_prompt(0, scores)
        return made

    whole = json.loads(form().whole([piece], usage()))["choices"][0]["logprobs"]
    streaming = form()
    data = streaming.opening(0, usage) + streaming.events(0, piece, usage)
    joined: dict[str, Any] = {}
    for event in data.decode().split("\n\n")[:-1]:
        logprobs = json.loads(event.removeprefix("data: "))["choices"][0]["logprobs"]
        for name, column in (logprobs or {}).items():
            joined[name] = column if column is None else [*(joined.get(name) or []), *column]
    return [whole, joined]


def test_offsets_count_the_whole_characters_before_a_token(tokenizer: Tokenizer) -> None:
    for told in columns(tokenizer, "né👩!", scored(ids("né👩!"), ()), 0):
        assert told["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
        assert told["top_logprobs"] is None


def test_a_token_that_the_tokenizer_adds_takes_no_room_and_one_in_the_text_does(tokenizer: Tokenizer) -> None:
    for told in columns(tokenizer, "ab", scored([END_TOKEN, *ids("ab")], ()), 0):
        assert told["text_offset"] == [0, 0, 1, 2]
    for told in columns(tokenizer, f"{END}b", scored([END_TOKEN, *ids("b")], ()), 0):
        assert told["text_offset"] == [0, len(END), len(END) + 1]


def test_a_prompt_of_one_token_has_the_same_columns_whole_and_streamed(tokenizer: Tokenizer) -> None:
    for told in columns(tokenizer, "a", scored(ids("a"), ()), 1):
        assert told["top_logprobs"] == [None, {"x": -2.0}]


def test_of_alternatives_that_are_the_same_text_the_token_itself_is_told(tokenizer: Tokenizer) -> None:
    first, second = ids("é")
    for told in columns(tokenizer, "né", scored(ids("né"), ((second, -0.25), (first, -1.0))), 2):
        assert told["top_logprobs"][1] == {"�": -1.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_echo_without_a_token_more_is_the_prompt_and_its_logprobs(stream: bool, field: str) -> None:
    with RunningGateway([replying(ids("y"))]) as gateway:
        body = {"prompt": ["ab", "c"], "echo": True, "logprobs": 0, field: 0, "stop": ["a"]}
        if stream:
            body["stream_options"] = {"include_usage": True}
            events = [json.loads(event) for event in gateway.stream("/v1/completions", body)[:-1]]
            usage = events[-1]["usage"]
            choices = [choice for event in events for choice in event["choices"]]
            texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]
            columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            ends = {choice["finish_reason"] for choice in choices} - {None}
        else:
            status, answer = gateway.post("/v1/completions", body)
            assert status == 200, answer
            usage, choices = answer["usage"], answer["choices"]
            texts = [choice["text"] for choice in choices]
            columns = [choice["logprobs"] for choice in choices]
            ends = {choice["finish_reason"] for choice in choices}
        assert texts == ["ab", "c"]
        assert [told["tokens"] for told in columns] == [["a", "b"], ["c"]]
        assert [told["token_logprobs"] for told in columns] == [[None, -1.0], [None]]
        assert (usage["prompt_tokens"], usage["completion_tokens"], ends) == (3, 0, {"length"})
        status, answer = gateway.post("/v1/completions", {"prompt": "ab", field: 0})
        assert (status, answer["error"]["param"]) == (400, field)
