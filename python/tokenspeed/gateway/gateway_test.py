# SPDX-License-Identifier: MIT
"""What the gateway loads: nothing of the engine, and no torch. What its flags put together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import python_environment
from tokenspeed.config.gateway import parse_launch
from tokenspeed.gateway.app import run
from tokenspeed.gateway.testing.fake_engine import END_TOKEN, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids, write_tokenizer

FORBIDDEN = ("torch", "tokenspeed_kernel", "tokenspeed_cc", "tokenspeed.engine", "tokenspeed.models", "transformers")


def test_the_gateway_imports_no_torch_engine_or_kernel() -> None:
    code = "import sys, tokenspeed.gateway.app; print('\\n'.join(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=python_environment(),
    )
    modules = run.stdout.split()
    assert "tokenspeed.gateway.http.server" in modules
    assert [name for name in modules if name in FORBIDDEN] == []


def test_the_tokenizer_caches_are_used_when_asked_for_and_give_the_same_prompt() -> None:
    flags = ["--tokenizer-cache-enable-l0", "--tokenizer-cache-enable-l1"]
    messages = [{"role": "user", "content": "hi"}]
    with RunningGateway([replying(ids("Paris"))], flags) as running:
        for turn in ("one", "two", "two"):
            body = {"messages": [*messages, {"role": "user", "content": turn}]}
            assert running.post("/v1/chat/completions", body)[0] == 200
        first, second, third = (request.input_ids for request in running.engines[0].seen.requests)
        shared = first[: -len(ids("one[assistant]")) - 1]
        assert second == third == [*shared, *ids("two"), END_TOKEN, *ids("[assistant]")]
        text = running.request("GET", "/metrics")[2].decode()
    assert 'smg_tokenizer_cache_lookups_total{layer="l0",result="hit"} 1.0' in text
    assert 'smg_tokenizer_cache_lookups_total{layer="l1",result="hit"}' in text


def test_a_chat_template_may_be_named() -> None:
    with RunningGateway([replying(ids("Paris"))], ["--chat-template", "chatml"]) as running:
        assert running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})[0] == 200
        prompt = running.engines[0].seen.requests[0].input_ids
    assert prompt == ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_chat_template_that_is_neither_a_name_nor_a_file_is_said_with_the_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path)
    words = ["--worker-urls", f"ipc://{tmp_path}/w", "--model-path", str(tmp_path), "--chat-template", "chatmel"]
    assert run(parse_launch(words)) == 2
    assert "chatmel is none of alpaca, chatml," in capsys.readouterr().err
