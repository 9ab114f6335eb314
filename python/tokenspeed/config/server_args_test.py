# SPDX-License-Identifier: MIT
"""`ServerArgs`: the table of flags through argparse, and back to what the engine takes."""

from __future__ import annotations

import argparse
import copy
import dataclasses

import pytest

from tokenspeed.config.flags import values_from_kwargs
from tokenspeed.config.flags_table import ENGINE_FLAGS
from tokenspeed.config.server_args import TABLE, ServerArgs, prepare_server_args


def test_every_flag_is_a_field_and_a_word_of_the_parser() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    words = {word for action in parser._actions for word in action.option_strings}
    assert words >= {name for flag in TABLE for name in flag.names}
    assert {flag.dest for flag in TABLE} <= {field.name for field in dataclasses.fields(ServerArgs)}
    assert "model_path" in {action.dest for action in parser._actions}
    assert parser.format_help()


def test_nothing_said_is_nothing_asked_of_the_engine() -> None:
    args = prepare_server_args([])
    assert args.engine_options() == {}
    assert dataclasses.asdict(args)["max_num_seqs"] is None
    assert copy.deepcopy(args) == args


def test_words_reach_the_engine_as_its_own_keywords() -> None:
    words = ["m.gguf", "--tp", "2", "--no-enable-prefix-caching", "--block-size", "16", "--port", "7"]
    args = prepare_server_args([*words, "--kernel-override", "a=b", "--kernel-override", "c=d"])
    assert (args.model, args.port, args.mapping.world_size) == ("m.gguf", 7, 2)
    assert args.prefix_granularity == args.page_size == 16
    expected = {
        "model": "m.gguf",
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "block_size": 16,
        "kernel_override": ("a=b", "c=d"),
    }
    assert args.engine_options() == expected
    assert values_from_kwargs(expected, ENGINE_FLAGS).values["block_size"] == 16


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device", "npu"], "npu"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["--no-such-flag"], "--no-such-flag"),
        (["a", "--model", "b"], "given twice"),
    ],
)
def test_what_is_wrong_is_named_and_ends_with_status_2(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare_server_args(words)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
