# SPDX-License-Identifier: MIT
"""The flag table and the parser: every known flag is honoured or refused by name, nothing in between."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tokenspeed.config.flags import FlagError, defaults, parse_flags, values_from_kwargs
from tokenspeed.config.flags_table import ENGINE_FLAGS, SUPERVISOR_FLAGS


def parse(*argv: str) -> dict[str, Any]:
    parsed = parse_flags(argv, ENGINE_FLAGS)
    assert not parsed.rest
    return parsed.values


def test_no_spelling_belongs_to_two_flags() -> None:
    spellings = Counter(name for flag in ENGINE_FLAGS + SUPERVISOR_FLAGS for name in flag.names)
    assert [name for name, count in spellings.items() if count > 1] == []


def test_every_flag_is_honoured_with_a_meaning_or_refused_with_a_reason() -> None:
    for flag in ENGINE_FLAGS:
        assert bool(flag.help) != bool(flag.refusal), flag.name
        assert not flag.accepts or flag.refusal, f"{flag.name}: only a refused flag lists what passes"


@pytest.mark.parametrize("flag", [flag for flag in ENGINE_FLAGS if flag.refusal], ids=lambda flag: flag.name)
def test_a_refused_flag_is_refused_under_each_of_its_names_and_passes_with_its_default(flag: Any) -> None:
    for name in flag.names:
        operand = {"int": ["77"], "float": ["77"], "str": ["x"], "ints": ["77", "78"]}.get(flag.kind, [])
        if flag.name == "--enable-replay-ssm":  # its only value is what happens anyway
            assert parse(name) == defaults(ENGINE_FLAGS)
            continue
        with pytest.raises(FlagError, match="refused") as caught:
            parse(name, *operand)
        assert caught.value.flag == name and flag.refusal in str(caught.value)
    if flag.takes_value and flag.default is not None:
        assert parse(flag.name, str(flag.default))[flag.dest] == flag.default


TABLE: list[tuple[list[str], str, Any]] = [
    ([], "model", None),
    (["a/b"], "model", "a/b"),
    (["--model-path", "x"], "model", "x"),
    (["--model=x=y"], "model", "x=y"),
    (["m", "--max-model-len", "32"], "max_model_len", 32),
    (["--max-model-len=32", "m"], "model", "m"),
    (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
    (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
    (["--prefix-granularity", "32"], "block_size", 32),
    (["--disable-prefix-caching"], "enable_prefix_caching", False),
    (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
    (["--enable-prefix-caching"], "enable_prefix_caching", True),
    (["--kernel-override", "a=b", "--kernel-override", "c=d"], "kernel_override", ("a=b", "c=d")),
    (["--no-enable-log-requests"], "enable_log_requests", False),
    (["--enforce-eager=yes"], "enforce_eager", True),
    (["--disable-prefix-caching=false"], "enable_prefix_caching", True),
    (["--tp", "1"], "tensor_parallel_size", 1),
    (["--nnodes", "1"], "nnodes", 1),
]


@pytest.mark.parametrize(("argv", "dest", "value"), TABLE, ids=lambda value: str(value))
def test_values_arrive_at_their_destination(argv: list[str], dest: str, value: Any) -> None:
    assert parse(*argv)[dest] == value


BAD = [
    (["--max-model-len"], "--max-model-len: needs a value"),
    (["--max-model-len", "--seed"], "--max-model-len: needs a value"),
    (["--max-model-len", "many"], "'many' is not an integer"),
    (["--gpu-memory-utilization", "half"], "'half' is not a number"),
    (["--device", "tpu"], "'tpu' is not one of auto, cpu, cuda"),
    (["--enforce-eager=perhaps"], "neither true nor false"),
    (["a", "b"], "given twice"),
    (["a", "--model", "b"], "given twice"),
    (["--pipeline-parallel-size", "2"], "a part of every layer"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=lambda value: str(value))
def test_a_bad_value_is_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse(*argv)
    assert message in str(caught.value)


def test_unknown_flags_are_handed_back_with_what_followed_them() -> None:
    parsed = parse_flags(["m", "--policy", "random", "--seed", "1", "--worker-urls", "a", "b", "--x"], ENGINE_FLAGS)
    assert parsed.rest == ["--policy", "random", "--worker-urls", "a", "b", "--x"]
    assert parsed.values["seed"] == 1 and parsed.values["model"] == "m"


def test_what_the_user_wrote_is_remembered_by_its_spelling() -> None:
    assert parse_flags(["--block-size", "16"], ENGINE_FLAGS).given == {"block_size": "--block-size"}


def test_keywords_are_the_flags_with_underscores() -> None:
    values = values_from_kwargs(
        {"model": "m", "max_model_len": 32, "prefix_granularity": 16, "kernel_override": "a=b", "seed": None},
        ENGINE_FLAGS,
    ).values
    assert values["max_model_len"] == 32 and values["block_size"] == 16 and values["seed"] is None
    assert values["kernel_override"] == ("a=b",)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"no_such": 1}, "no_such: no such option"),
        ({"max_model_len": "32"}, "not of type int"),
        ({"max_model_len": True}, "not of type int"),
        ({"enforce_eager": 1}, "not of type bool"),
        ({"enable_eplb": True}, "refused"),
        ({"device": "tpu"}, "not one of"),
    ],
)
def test_a_bad_keyword_is_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        values_from_kwargs(kwargs, ENGINE_FLAGS)
