# SPDX-License-Identifier: MIT
"""`Engine`: the same tokens in process, without a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tokenspeed import Engine
from tokenspeed.config.sampling import RequestError


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_model_len=1024, max_num_seqs=16, max_total_tokens=8192) as running:
        yield running


def test_a_list_of_prompts_comes_back_in_its_order(engine: Engine) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    outputs = engine.generate(prompts, {"temperature": 0.0, "max_new_tokens": 8})
    assert len(outputs) == 2
    assert "Paris" in outputs[0].text and "Rome" in outputs[1].text
    assert all(output.finish_reason in ("stop", "length") for output in outputs)


def test_a_batch_equals_single_runs(engine: Engine) -> None:
    prompts = [f"Number {index} is" for index in range(12)]
    params = {"temperature": 0.7, "seed": 3, "max_new_tokens": 16}
    batch = [output.token_ids for output in engine.generate(prompts, params)]
    assert batch == [engine.generate([prompt], params)[0].token_ids for prompt in prompts]


def test_a_text_that_is_no_unicode_is_refused_by_name_and_the_next_one_works(engine: Engine) -> None:
    with pytest.raises(RequestError, match="no Unicode text") as caught:
        engine.generate("a\ud800b", {"max_new_tokens": 2})
    assert (caught.value.field, caught.value.code) == ("prompt", "invalid_value")
    assert engine.generate("ab", {"max_new_tokens": 2})[0].token_ids


def test_an_unknown_model_exits_2_with_one_line_that_names_it() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tokenspeed.cli.ts", "serve", "/no/such/model"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and "/no/such/model" in lines[0]


def test_a_flag_that_nobody_honours_exits_2_by_name() -> None:
    for flag in ("--no-such-flag", "--enable-eplb"):
        result = subprocess.run(
            [sys.executable, "-m", "tokenspeed.cli.ts", "serve", flag], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 2 and flag in result.stderr
