# SPDX-License-Identifier: MIT
"""The embedded model through the whole path, as the `openai` client sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me a short story about a robot who learns to paint."}]


def joined(chunks: Iterable[ChatCompletionChunk]) -> dict[int, str]:
    """The text of each choice of a stream; asserts the order role, text, one finish, on the way."""
    text: dict[int, str] = {}
    finished: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in finished, "a delta came after the finish chunk"
            if choice.index not in text:
                assert choice.delta.role == "assistant", "the first delta names the role"
                text[choice.index] = ""
            text[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                finished[choice.index] = choice.finish_reason
    assert set(finished) == set(text), "every choice has exactly one finish chunk"
    return text


def test_the_capital_of_france_is_paris(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_joins_to_the_one_shot_answer(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=STORY, temperature=0, max_tokens=60)
    stream = client.chat.completions.create(model=model, messages=STORY, temperature=0, max_tokens=60, stream=True)
    assert joined(stream) == {0: whole.choices[0].message.content}


def test_a_stream_reports_usage_when_asked_in_a_last_chunk_without_choices(client: openai.OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=STORY,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_four_choices_differ_and_share_one_prompt(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=STORY, temperature=1.2, n=4, max_tokens=24, seed=11)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    single = client.chat.completions.create(model=model, messages=STORY, temperature=1.2, max_tokens=24, seed=11)
    assert answer.usage is not None and single.usage is not None
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens, "the prompt is counted once, not four times"
    assert single.choices[0].message.content == texts[0], "choice 0 of a seed is the single request of that seed"


def test_choices_stream_under_their_own_index(client: openai.OpenAI, model: str) -> None:
    args = {"model": model, "messages": STORY, "temperature": 1.0, "n": 3, "max_tokens": 16, "seed": 5}
    whole = client.chat.completions.create(**args)
    streamed = joined(client.chat.completions.create(**args, stream=True))
    assert streamed == {choice.index: choice.message.content for choice in whole.choices}


def test_logprobs_name_the_token_and_sort_the_alternatives(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content, "logprobs were asked for"
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "the greedy token is the likeliest"
        values = [alternative.logprob for alternative in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) <= 1 + 1e-5
    text = "".join(token.token for token in content)
    assert (answer.choices[0].message.content or "").startswith(text[:8])


def test_a_stop_string_ends_the_text_right_before_it(client: openai.OpenAI, model: str) -> None:
    args = {"model": model, "messages": STORY, "temperature": 0, "max_tokens": 60}
    full = client.chat.completions.create(**args).choices[0].message.content or ""
    stop = full[20:26]  # crosses token borders: any six characters of the text do
    expected = full[: full.index(stop)]
    answer = client.chat.completions.create(**args, stop=[stop])
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    assert joined(client.chat.completions.create(**args, stop=[stop], stream=True)) == {0: expected}


def test_a_seeded_request_does_not_change_with_its_neighbours(client: openai.OpenAI, model: str) -> None:
    args = {"model": model, "messages": STORY, "temperature": 0.9, "max_tokens": 24, "seed": 123}
    alone = client.chat.completions.create(**args).choices[0].message.content
    neighbours = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=1.5, n=6, max_tokens=48, stream=True
    )
    amid = client.chat.completions.create(**args).choices[0].message.content
    neighbours.close()
    assert amid == alone


def test_a_text_completion_streams_echoes_and_takes_several_prompts(client: openai.OpenAI, model: str) -> None:
    prompts = ["The sky is", "One plus one is"]
    whole = client.completions.create(model=model, prompt=prompts, temperature=0, max_tokens=8, echo=True)
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice, prompt in zip(whole.choices, prompts, strict=True):
        assert choice.text.startswith(prompt) and len(choice.text) > len(prompt)
    plain = client.completions.create(model=model, prompt=prompts[0], temperature=0, max_tokens=8)
    stream = client.completions.create(model=model, prompt=prompts[0], temperature=0, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == plain.choices[0].text
    assert prompts[0] + plain.choices[0].text == whole.choices[0].text


def test_korean_and_emoji_stream_as_they_decode(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "Repeat exactly: 안녕하세요 👋🏽 세계 🌍"}]
    args = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 48}
    whole = client.chat.completions.create(**args).choices[0].message.content
    assert joined(client.chat.completions.create(**args, stream=True)) == {0: whole}


def test_min_tokens_and_ignore_eos_hold_the_end_back(client: openai.OpenAI, model: str) -> None:
    args = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    short = client.chat.completions.create(**args)
    assert short.usage is not None and short.usage.completion_tokens < 40
    longer = client.chat.completions.create(**args, extra_body={"min_tokens": 30})
    assert longer.usage is not None and longer.usage.completion_tokens >= 30
    full = client.chat.completions.create(**args, extra_body={"ignore_eos": True})
    assert full.usage is not None and full.usage.completion_tokens == 40
    assert full.choices[0].finish_reason == "length"


def test_penalties_and_bias_are_honoured(client: openai.OpenAI, model: str) -> None:
    args = {"model": model, "prompt": "a a a a a a a a a a", "temperature": 0, "max_tokens": 12}
    plain = client.completions.create(**args).choices[0].text
    penalised = client.completions.create(**args, frequency_penalty=2.0, presence_penalty=2.0).choices[0].text
    assert plain != penalised
    forced = client.completions.create(**args, logit_bias={"33": 100}).choices[0].text
    banned = client.completions.create(**args, logit_bias={"33": -100}).choices[0].text
    assert len(set(forced)) == 1 and forced[0] not in banned


def test_a_cached_prefix_is_shared_by_requests_of_the_same_salt_only(client: openai.OpenAI, model: str) -> None:
    args: dict[str, Any] = {"model": model, "prompt": "One salt, one cache. " * 20, "temperature": 0, "max_tokens": 4}

    def cached(salt: str | None) -> tuple[int, str]:
        answer = client.completions.create(**args, extra_body={"cache_salt": salt})
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.choices[0].text

    first, text = cached("ours")
    assert first == 0
    for salt, hits in (("theirs", False), (None, False), ("ours", True), ("theirs", True)):
        num_cached, same = cached(salt)
        assert (num_cached > 0, same) == (hits, text)
