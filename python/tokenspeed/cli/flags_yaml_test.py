# SPDX-License-Identifier: MIT
"""Flags out of a YAML file: the command line wins, and what is no flag is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.cli.serve import with_yaml
from tokenspeed.config.flags import FlagError
from tokenspeed.config.flags_table import ENGINE_FLAGS
from tokenspeed.config.flags_yaml import keywords_with_yaml
from tokenspeed.config.server_args import prepare_server_args

FLAGS = """
model: a/b
max_model_len: 32
--chunked-prefill-size: -1
enable-prefix-caching: false
enforce_eager: true
cudagraph-capture-sizes: [1, 2, 4]
kernel-override: [a=b, c=d]
kv-events-config: {publisher: zmq, hwm: 7}
hf-overrides:
policy: random
drain-timeout: 2.5
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "flags.yaml"
    path.write_text(FLAGS, encoding="utf-8")
    return str(path)


def test_a_file_says_flags_of_engine_gateway_and_supervisor(file: str) -> None:
    split = with_yaml(["--ext-yaml", file])
    engine: dict[str, Any] = split.engine.values
    assert (engine["model"], engine["max_model_len"], engine["chunked_prefill_size"]) == ("a/b", 32, -1)
    assert (engine["enable_prefix_caching"], engine["enforce_eager"]) == (False, True)
    assert (engine["cudagraph_capture_sizes"], engine["kernel_override"]) == ((1, 2, 4), ("a=b", "c=d"))
    assert json.loads(engine["kv_events_config"]) == {"publisher": "zmq", "hwm": 7}
    assert split.gateway_words == ["--policy=random"] and split.supervisor.values["drain_timeout"] == 2.5
    assert not any("ext-yaml" in word for word in split.engine_words)


def test_a_list_of_numbers_takes_no_word_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("cudagraph-capture-sizes: [1, 2, 4]", encoding="utf-8")
    engine = with_yaml(["some/model", "--ext-yaml", str(path)]).engine.values
    assert (engine["model"], engine["cudagraph_capture_sizes"]) == ("some/model", (1, 2, 4))


def test_the_command_line_wins_whatever_its_spelling(file: str) -> None:
    words = f"other --max-model-len=64 --no-enforce-eager --ext-yaml={file} --kernel-override e=f --policy round_robin"
    split = with_yaml([*words.split(), "--drain-timeout", "9", "--disable-prefix-caching=false"])
    engine: dict[str, Any] = split.engine.values
    assert (engine["model"], engine["max_model_len"], engine["enforce_eager"]) == ("other", 64, False)
    assert (engine["kernel_override"], engine["enable_prefix_caching"]) == (("e=f",), True)
    assert split.gateway_words == ["--policy", "round_robin"] and split.supervisor.values["drain_timeout"] == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_flag: 1", "no_such_flag: no such flag"),
        ("max-model-len: many", "--max-model-len: 'many' is not an integer"),
        ("enforce_eager: maybe", "--enforce-eager: 'maybe' is neither true nor false"),
        ("enable_eplb: true", "--enable-eplb: refused"),
        ("max-model-len: 1\nmax_model_len: 2", "max_model_len and max-model-len are the same flag"),
        ("block-size: 8\nprefix-granularity: 8", "are the same flag"),
        ("ext-yaml: other.yaml", "a file names no other one"),
        ("[1, 2]", "must hold a mapping"),
        ("a: [", "while parsing"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FlagError) as caught:
        with_yaml(["--ext-yaml", str(path)])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(FlagError, match=r"--ext-yaml: .*No such file"):
        with_yaml(["--ext-yaml", "/nowhere/flags.yaml"])


def test_keywords_and_parsed_arguments_read_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("model: a/b\nblock-size: 16\nmax_num_seqs: 4", encoding="utf-8")
    found = keywords_with_yaml({"model": None, "ext_yaml": str(path), "prefix_granularity": 32}, ENGINE_FLAGS)
    assert found == {"model": "a/b", "max_num_seqs": 4, "prefix_granularity": 32}
    args = prepare_server_args(["--ext-yaml", str(path), "--max-num-seqs", "2"])
    assert (args.model, args.block_size, args.max_num_seqs, args.ext_yaml) == ("a/b", 16, 2, None)
