# SPDX-License-Identifier: MIT
"""The same tokens and logprobs, to the last bit, whatever the engine's settings, the company or the cache."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import jsonschema_rs
import pytest

from tokenspeed import Engine
from tokenspeed.config.sampling import derive_seed
from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.local_frontend import Delta

LONG = "The history of the sea, as the old sailors told it, begins with a storm. " * 20
PROMPTS = [LONG, "def quicksort(items):", LONG + "And then", "1, 1, 2, 3, 5,"]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 12, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_new_tokens": 12, "logprobs": 2},
    {"temperature": 1.1, "top_k": 30, "seed": 6, "max_new_tokens": 12, "logprobs": 2, "frequency_penalty": 0.3},
    {"temperature": 0, "max_new_tokens": 12, "logprobs": 2, "regex": " [0-9 ,]{8,}"},
]
Told = list[tuple[list[int], Any]]


def told(engine: Engine) -> Told:
    return [(output.token_ids, output.logprobs) for output in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine(deterministic=True, max_num_seqs=32, max_total_tokens=32 * 512, max_model_len=1024) as running:
        yield running


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Told:
    return told(engine)


@pytest.mark.parametrize(
    ("chunk", "block", "depth"),
    [(16, 8, 0), (16, 256, 1), (64, 16, 1), (128, 32, 0), (2048, 128, 1), (8192, 256, 0), (8192, 8, 1)],
)
def test_chunks_blocks_and_overlap_change_nothing(expected: Told, chunk: int, block: int, depth: int) -> None:
    settings: dict[str, Any] = {"chunked_prefill_size": chunk, "block_size": block, "overlap_depth": depth}
    with Engine(deterministic=True, max_num_seqs=8, max_total_tokens=8192, max_model_len=1024, **settings) as engine:
        cold, warm = told(engine), told(engine)
    assert cold == expected, "another engine, cold"
    assert warm == expected, "the same prompts from the cache"


def test_a_request_is_the_same_alone_and_amid_31_others(engine: Engine, expected: Told) -> None:
    others = [f"{number} green bottles" for number in range(31)]
    noise = {"temperature": 1.3, "max_new_tokens": 24, "ignore_eos": True}
    for index in (0, 1, 3):
        outputs = engine.generate([PROMPTS[index], *others], [PARAMS[index], *[noise] * 31])
        assert (outputs[0].token_ids, outputs[0].logprobs) == expected[index]


def test_eight_choices_differ_and_each_is_its_own_seeded_run(engine: Engine) -> None:
    params = {"temperature": 1.2, "max_new_tokens": 16, "seed": 77}
    (output,) = engine.generate("Once upon a time", {**params, "n": 8})
    tokens = [choice.token_ids for choice in output.choices]
    assert len({tuple(ids) for ids in tokens}) == 8
    singles = [{**params, "seed": derive_seed(77, index)} for index in range(8)]
    assert [single.token_ids for single in engine.generate(["Once upon a time"] * 8, singles)] == tokens


def test_what_follows_free_reasoning_is_valid_in_every_choice_of_32(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    params = {"temperature": 1.0, "n": 4, "max_new_tokens": 100, "json_schema": json.dumps(schema)}
    asked = [{**params, "seed": index, "reasoning_end": "."} for index in range(8)]
    outputs = engine.generate(["Where shall we go, and for how long?"] * 8, asked)
    texts = [choice.text for output in outputs for choice in output.choices if choice.finish_reason == "stop"]
    assert len(texts) > 16 and len(set(texts)) > 16, "most come to their end"
    for text in texts:
        reasoning, _, answer = text.partition(".")
        assert reasoning and jsonschema_rs.Draft202012Validator(schema).is_valid(json.loads(answer)), text
    single = {**asked[3], "n": 1, "seed": derive_seed(3, 2)}
    alone = engine.generate("Where shall we go, and for how long?", single)[0]
    assert alone.token_ids == outputs[3].choices[2].token_ids


def test_the_best_of_many_are_those_with_the_highest_mean_logprob(engine: Engine) -> None:
    params = {"temperature": 1.2, "max_new_tokens": 10, "seed": 3, "logprobs": 0}
    (everything,) = engine.generate("My favourite colour is", {**params, "n": 6})
    (best,) = engine.generate("My favourite colour is", {**params, "n": 2, "best_of": 6})
    ranked = sorted(everything.choices, key=lambda choice: -choice.mean_logprob)
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]


def test_two_hundred_aborts_at_random_points_leave_no_block_held(engine: Engine) -> None:
    draw = random.Random(1)
    ended: dict[str, int] = {}
    done = threading.Event()

    def collect(deltas: list[Delta] | EngineDeadError) -> None:
        assert isinstance(deltas, list)
        for delta in deltas:
            if delta.finish:
                ended[delta.rid] = ended.get(delta.rid, 0) + 1
        if len(ended) == 200:
            done.set()

    for number in range(200):
        params: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": draw.randint(1, 60), "ignore_eos": True}
        if number % 7 == 0:
            params["regex"] = f"[a-z ]{{{number + 40}}}"
        (request,) = engine.job(LONG[: draw.randint(4, 900)] + str(number), params).requests
        engine.frontend.submit([request], collect)
        threading.Timer(draw.uniform(0, 0.5), engine.frontend.abort, [[request.rid]]).start()
        time.sleep(draw.uniform(0, 0.02))
    assert done.wait(120)
    assert set(ended.values()) == {1}, "every request ends once"
    deadline_s = time.monotonic() + 10
    while engine.load().active_blocks and time.monotonic() < deadline_s:
        time.sleep(0.02)
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.active_blocks) == (0, 0, 0)
