# SPDX-License-Identifier: MIT
"""Legal and illegal sampling parameters, the room for output, and derived seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tokenspeed.config.sampling import (
    RequestError,
    SamplingParams,
    check_prompt,
    derive_seed,
    room_for_output,
)

VOCAB, LIMIT = 1000, 64

INVALID: list[tuple[str, Any, str]] = [
    ("temperature", math.nan, "invalid_value"),
    ("temperature", math.inf, "invalid_value"),
    ("temperature", -0.1, "invalid_value"),
    ("temperature", 10**400, "invalid_value"),
    ("temperature", "hot", "invalid_type"),
    ("temperature", True, "invalid_type"),
    ("temperature", None, "invalid_type"),
    ("top_p", 0, "invalid_value"),
    ("top_p", 1.01, "invalid_value"),
    ("top_p", math.nan, "invalid_value"),
    ("top_k", 2.0, "invalid_type"),
    ("min_p", -0.1, "invalid_value"),
    ("min_p", 2.0, "invalid_value"),
    ("frequency_penalty", 2.5, "invalid_value"),
    ("presence_penalty", -2.5, "invalid_value"),
    ("repetition_penalty", 0.0, "invalid_value"),
    ("repetition_penalty", math.inf, "invalid_value"),
    ("n", 0, "invalid_value"),
    ("n", 1.0, "invalid_type"),
    ("seed", 2**63, "invalid_value"),
    ("seed", 1.5, "invalid_type"),
    ("logprobs", -1, "invalid_value"),
    ("logprobs", 21, "invalid_value"),
    ("logprobs", True, "invalid_type"),
    ("ignore_eos", 1, "invalid_type"),
    ("max_new_tokens", 0, "invalid_value"),
    ("max_new_tokens", "many", "invalid_type"),
    ("min_new_tokens", -1, "invalid_value"),
    ("stream_interval", 0, "invalid_value"),
    ("stop", "", "invalid_value"),
    ("stop", ["a", ""], "invalid_value"),
    ("stop", [1], "invalid_type"),
    ("stop", 1, "invalid_type"),
    ("stop", ["x"] * 65, "invalid_value"),
    ("stop", ["x" * 1025], "invalid_value"),
    ("stop_token_ids", [VOCAB], "invalid_value"),
    ("stop_token_ids", [-1], "invalid_value"),
    ("stop_token_ids", ["a"], "invalid_type"),
    ("logit_bias", {VOCAB: 1.0}, "invalid_value"),
    ("logit_bias", {-1: 1.0}, "invalid_value"),
    ("logit_bias", {"5": 1.0}, "invalid_type"),
    ("logit_bias", {5: math.nan}, "invalid_value"),
    ("logit_bias", {5: 101}, "invalid_value"),
    ("logit_bias", [5], "invalid_type"),
]


@pytest.mark.parametrize(("field", "value", "code"), INVALID, ids=lambda value: str(value)[:20])
def test_an_illegal_value_is_refused_with_its_field_and_code(field: str, value: Any, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_mapping({field: value}).validate(VOCAB, LIMIT)
    assert (caught.value.field, caught.value.code) == (field, code)
    assert field in caught.value.message


def test_a_seed_that_is_too_large_is_told_the_limit_that_it_breaks() -> None:
    with pytest.raises(RequestError, match=r"in \[-9223372036854775808, 9223372036854775807\]"):
        SamplingParams.from_mapping({"seed": 2**63}).validate(VOCAB, LIMIT)


LEGAL: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "top_p": 1, "top_k": 0},
    {"temperature": 2, "top_p": 1e-3, "top_k": 1 << 30, "min_p": 1.0},
    {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 1.3},
    {"stop": "x", "stop_token_ids": 5},
    {"stop": None, "stop_token_ids": None, "logit_bias": {}},
    {"logit_bias": {0: -100, VOCAB - 1: 100}},
    {"seed": -1, "n": 128, "logprobs": 20, "max_new_tokens": 1, "min_new_tokens": 1},
]


@pytest.mark.parametrize("values", LEGAL, ids=str)
def test_a_legal_value_passes(values: dict[str, Any]) -> None:
    SamplingParams.from_mapping(values).validate(VOCAB, LIMIT)


def test_lone_stops_become_tuples() -> None:
    params = SamplingParams.from_mapping({"stop": "END", "stop_token_ids": 7})
    assert params.stop == ("END",) and params.stop_token_ids == (7,)


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="best_of_n is not a sampling parameter") as caught:
        SamplingParams.from_mapping({"best_of_n": 3})
    assert caught.value.code == "unknown_parameter"


def test_the_minimum_may_not_exceed_the_maximum() -> None:
    with pytest.raises(RequestError, match=r"min_new_tokens \(5\)"):
        SamplingParams(max_new_tokens=4, min_new_tokens=5).validate(VOCAB, LIMIT)


@pytest.mark.parametrize(
    ("prompt", "code"), [([], "empty_prompt"), ([VOCAB], "invalid_token_id"), ([-1], "invalid_token_id")]
)
def test_a_bad_prompt_is_refused(prompt: list[int], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt(prompt, VOCAB)
    assert (caught.value.field, caught.value.code) == ("prompt", code)


@pytest.mark.parametrize(
    ("num_prompt", "asked", "room"), [(63, None, 1), (1, None, 63), (63, 1, 1), (60, 4, 4), (60, 2, 2)]
)
def test_room_for_output_reaches_the_limit_exactly(num_prompt: int, asked: int | None, room: int) -> None:
    assert room_for_output(num_prompt, asked, LIMIT) == room


@pytest.mark.parametrize(("num_prompt", "asked"), [(64, None), (64, 1), (60, 5), (5000, None)])
def test_a_prompt_that_does_not_fit_is_refused_with_the_three_numbers(num_prompt: int, asked: int | None) -> None:
    with pytest.raises(RequestError) as caught:
        room_for_output(num_prompt, asked, LIMIT)
    assert caught.value.code == "context_length_exceeded"
    for number in (LIMIT, num_prompt, *([asked] if asked else [])):
        assert str(number) in caught.value.message


def test_choice_zero_keeps_the_seed_and_the_others_differ() -> None:
    seeds = [derive_seed(42, choice) for choice in range(100)]
    assert seeds[0] == 42 and len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    # The second output of the published generator seeded with 0.
    assert derive_seed(0, 1) == 0x6E789E6AA1B965F4 & (2**63 - 1)
