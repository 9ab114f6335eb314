# SPDX-License-Identifier: MIT
"""Every token right: against `transformers`, against itself under load, and against its own cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from tests.support.reference import greedy_choices, load_reference
from tests.support.server import Server

NAMED = [260, 28, 49151]
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain what a hash table is, in two sentences.",
    "List three uses of copper.",
    "def fibonacci(n):",
    "Translate to Spanish: good morning, my friend.",
    "Why is the sky blue?",
    "1, 1, 2, 3, 5, 8,",
    "안녕하세요! 자기소개를 해 주세요. 🙂",
    "Once upon a time, in a village by a lake,",
]
NUM_TOKENS = 64
# Two float32 programs may order a sum differently; where the reference's best two logits are closer than this, either
# pick is right.
TIE_MARGIN = 2e-3


def completion_tokens(client: openai.OpenAI, model: str, prompt: str) -> tuple[list[int], list[int]]:
    """The prompt's ids and the ids of a greedy continuation, both as the server tells them."""
    answer = client.completions.create(
        model=model,
        prompt=prompt,
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    extra = answer.choices[0].model_extra or {}
    return extra["prompt_token_ids"], extra["token_ids"]


def test_64_greedy_tokens_equal_transformers_for_ten_prompts(client: openai.OpenAI, model: str) -> None:
    reference = load_reference(os.environ["TOKENSPEED_EMBEDDED_MODEL"])
    num_ties = 0
    for prompt in PROMPTS:
        prompt_ids, ids = completion_tokens(client, model, prompt)
        expected, margins = greedy_choices(reference, prompt_ids, ids)
        assert len(ids) == NUM_TOKENS
        for position, (got, want) in enumerate(zip(ids, expected, strict=True)):
            if got != want:
                assert margins[position] < TIE_MARGIN, f"{prompt!r}: token {position} is {got}, transformers' is {want}"
                num_ties += 1
    assert num_ties <= 3, "a tie is possible, but rare"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sixteen_concurrent_streams_each_equal_their_own_single_run(
    client: openai.OpenAI, model: str, temperature: float
) -> None:
    def run(index: int) -> str:
        stream = client.completions.create(
            model=model,
            prompt=f"{PROMPTS[index % len(PROMPTS)]} ({index})",
            temperature=temperature,
            seed=1000 + index,
            max_tokens=40,
            stream=True,
        )
        return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    single = [run(index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        concurrent = list(pool.map(run, range(16)))
    # On the CPU every accumulation has a fixed order, so the tolerance is zero.
    assert concurrent == single


def test_a_repeated_prompt_is_cached_and_gives_the_same_answer(
    server: Server, client: openai.OpenAI, model: str
) -> None:
    messages = [{"role": "user", "content": "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 40}]
    args = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 16, "logprobs": True}
    cold = client.chat.completions.create(**args)
    warm = client.chat.completions.create(**args)
    stream = list(client.chat.completions.create(**args, stream=True, stream_options={"include_usage": True}))
    assert cold.usage is not None and warm.usage is not None and stream[-1].usage is not None
    assert warm.usage.prompt_tokens_details is not None
    cached = warm.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached > 0.8 * warm.usage.prompt_tokens
    assert stream[-1].usage.prompt_tokens_details is not None
    assert stream[-1].usage.prompt_tokens_details.cached_tokens == cached
    assert cold.choices[0].message.content == warm.choices[0].message.content
    assert cold.choices[0].logprobs == warm.choices[0].logprobs, "cold and warm agree to the last bit"


def test_logprobs_of_a_prompt_are_those_of_transformers_cold_or_warm(client: openai.OpenAI, model: str) -> None:
    reference = load_reference(os.environ["TOKENSPEED_EMBEDDED_MODEL"])
    prompt = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 8
    args = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 4}
    client.completions.create(**args)
    echoed = client.completions.create(**args, echo=True, logprobs=2, extra_body={"return_token_ids": True}).choices[0]
    assert echoed.logprobs and echoed.logprobs.token_logprobs and echoed.logprobs.tokens
    ids = (echoed.model_extra or {})["prompt_token_ids"]
    values = echoed.logprobs.token_logprobs[: len(ids)]
    assert values[0] is None and "".join(echoed.logprobs.tokens[: len(ids)]) == prompt
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    for position in range(1, len(ids)):
        assert abs(values[position] - float(expected[position - 1, ids[position]])) < 1e-4
    whole = client.completions.create(**args, extra_body={"prompt_logprobs": 2})
    entries = (whole.choices[0].model_extra or {})["prompt_logprobs"]
    told = [entry and entry[str(token)]["logprob"] for entry, token in zip(entries, ids, strict=True)]
    assert told == values, "the same bits, whatever else was computed before"
    stream = list(client.completions.create(**args, echo=True, logprobs=2, stream=True))
    first = stream[0].choices[0]
    assert first.text == prompt and first.logprobs and first.logprobs.token_logprobs == values


def test_logprobs_of_what_is_generated_and_of_its_rivals_are_those_of_transformers(server: Server) -> None:
    reference = load_reference(os.environ["TOKENSPEED_EMBEDDED_MODEL"])
    plain, num_top = {"max_new_tokens": 24, "ignore_eos": True}, 5
    changed = {"temperature": 1.3, "seed": 4, "repetition_penalty": 1.2, "logit_bias": {"33": 5}}
    for params in ({"temperature": 0} | plain, changed | plain):
        body: dict[str, Any] = {"text": PROMPTS[0], "sampling_params": params, "top_logprobs_num": num_top}
        body |= {"return_logprob": True, "token_ids_logprob": NAMED, "logprob_start_len": 2}
        prompt_ids = server.post("/v1/tokenize", {"prompt": PROMPTS[0]})[1]["tokens"]
        status, answer = server.post("/generate", body)
        assert status == 200, answer
        info, ids = answer["meta_info"], answer["output_ids"]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt_ids + ids])).logits[0, :-1]
        whole = logits.log_softmax(-1)
        expected = whole[len(prompt_ids) - 1 :]
        # Position p's scores stand in the row of the token before it.
        told = info["input_token_ids_logprobs"] + info["output_token_ids_logprobs"]
        for row, named in zip(whole[1:], told, strict=True):
            assert [token for _, token, _ in named] == NAMED
            assert all(abs(value - float(row[token])) < 1e-4 for value, token, _ in named)
        assert [entry[1] for entry in info["output_token_logprobs"]] == ids
        for row, (value, token, _), tops in zip(
            expected, info["output_token_logprobs"], info["output_top_logprobs"], strict=True
        ):
            assert abs(value - float(row[token])) < 1e-4
            best = row.topk(num_top).values.tolist()
            assert len({entry[1] for entry in tops}) == num_top
            for (top_value, top_id, _), want in zip(tops, best, strict=True):
                assert abs(top_value - want) < 1e-4 and abs(top_value - float(row[top_id])) < 1e-4
