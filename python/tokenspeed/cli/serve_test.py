# SPDX-License-Identifier: MIT
"""Whose flag is whose, what the children are started with, and what is refused before any of them starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import python_environment
from tokenspeed.cli import serve, smg, ts
from tokenspeed.cli._proc import fresh_worker_url, zmq_handshake_port
from tokenspeed.config.flags import FlagError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.version import __version__

URL = "ipc:///tmp/tokenspeed-0/x"

SPLITS: list[tuple[str, list[str], list[str]]] = [
    ("", [], []),
    ("m.gguf --max-num-seqs 4", ["--max-num-seqs", "4"], []),
    ("--model m --seed=3 --host ::1 --port 9000", ["--seed=3"], ["--host", "::1", "--port", "9000"]),
    ("--port 9000 m --device cpu", ["--device", "cpu"], ["--port", "9000"]),
    ("--drain-timeout 5 m --no-enable-prefix-caching", ["--no-enable-prefix-caching"], []),
    ("--chat-template t.jinja m --api-key k", [], ["--chat-template", "t.jinja", "--api-key", "k"]),
    ("m --kernel-override a=b --kernel-override c=d", ["--kernel-override", "a=b", "--kernel-override", "c=d"], []),
    ("--disable-retries m --log-level debug", ["--log-level", "debug"], ["--disable-retries"]),
    ("m --no-such-flag x --seed 3", ["--seed", "3"], ["--no-such-flag", "x"]),
]


@pytest.mark.parametrize(("line", "engine", "gateway"), SPLITS, ids=[row[0] or "nothing" for row in SPLITS])
def test_every_word_goes_to_its_owner(line: str, engine: list[str], gateway: list[str]) -> None:
    split = serve.split_argv(line.split())
    assert split.engine_words == engine and split.gateway_words == gateway


def test_the_engine_is_started_with_the_resolved_model_and_its_lane() -> None:
    split = serve.split_argv(["hub/name", "--seed", "3"])
    words = serve.engine_arguments(split, ModelSource("folder", Path("/models/x"), "hub/name"), URL, 9400)
    assert words[:4] == ["-m", "tokenspeed.cli.ts", "serve", "--headless"]
    again = serve.split_argv(words[3:])
    assert again.engine.values["model"] == "/models/x" and again.engine.values["served_model_name"] == "hub/name"
    assert again.engine.values["seed"] == 3
    assert again.engine.values["data_parallel_rpc_port"] == zmq_handshake_port(URL)
    assert again.engine.values["rl_control_port"] == 9400


def test_a_served_name_of_the_user_is_kept() -> None:
    split = serve.split_argv(["--served-model-name", "mine"])
    words = serve.engine_arguments(split, ModelSource("gguf", Path("/m.gguf"), "m"), URL, 9400)
    assert words.count("--served-model-name") == 1 and "mine" in words


def test_the_gateways_defaults_give_way_to_the_user() -> None:
    words = serve.gateway_arguments(serve.split_argv(["--drain-timeout", "7"]), URL)
    assert words[words.index("--port") + 1] == "8000"
    assert words[words.index("--shutdown-grace-period-secs") + 1] == "7.0"
    assert words[words.index("--worker-urls") + 1] == URL
    words = serve.gateway_arguments(serve.split_argv(["--port=9000"]), URL)
    assert "--port=9000" in words and "8000" not in words


REFUSED = [
    ("--headless --drain-timeout 5", "--drain-timeout"),
    ("--headless --policy random", "--policy"),
    ("--data-parallel-rpc-port 31000", "--data-parallel-rpc-port"),
    ("--worker-urls ipc:///x", "--worker-urls"),
    ("--no-such-flag", "--no-such-flag"),
    ("--enable-eplb", "--enable-eplb"),
    ("--disaggregation-mode prefill", "--disaggregation-mode"),
    ("--drain-timeout 0", "--drain-timeout"),
    ("--skip-tokenizer-init", "--skip-tokenizer-init"),
    ("--max-model-len 999999999", "--max-model-len"),
    ("--port 99999", "--port"),
]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(("line", "flag"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_nobody_honours_is_refused_by_name_before_anything_starts(folder: str, line: str, flag: str) -> None:
    with pytest.raises(FlagError) as caught:
        serve.main([folder, *line.split()])
    assert caught.value.flag == flag


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "/no/such/model"], "/no/such/model"),
        (["serve", "--enable-eplb"], "--enable-eplb"),
        (["serve", "--no-such-flag", "5"], "--no-such-flag"),
        (["dance"], "dance"),
        (["kernels"], "ts kernels list"),
        (["kernels", "polish"], "ts kernels list"),
        (["kernels", "tune", "--op", "norm.rmx"], "norm.rmx"),
        (["kernels", "explain", "norm.rmx"], "ts kernels explain: error: unknown operation"),
        (["env", "x"], "ts env: error: x: takes no arguments"),
        (["version", "--json"], "--json"),
        (["bench", "all"], "ts bench serve"),
        (["merge-traces", "/no/such/trace", "-o", "x"], "error: /no/such/trace: No such file"),
        (["serve", "--headless", "--port", "1"], "--port: is the gateway's"),
        (["serve", "--headless", "--data-parallel-address", "a:1"], "--data-parallel-address: 'a:1' is no host"),
        (["serve", "--headless", "--data-parallel-address", ""], "--data-parallel-address"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert ts.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1 and named in captured.err


def test_smg_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert smg.main(["launch", "--worker-urls", URL, "--no-such-flag"]) == 2
    assert "--no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize("program", [ts, smg])
def test_version_and_help_are_printed(capsys: pytest.CaptureFixture[str], program: object) -> None:
    assert program.main(["--version"]) == 0 and capsys.readouterr().out.strip() == __version__  # type: ignore[attr-defined]
    assert program.main([]) == 0 and "usage:" in capsys.readouterr().out  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", ["bench", "kernels", "kernels list", "kernels explain", "env", "version", "serve"])
def test_every_command_has_a_help(capsys: pytest.CaptureFixture[str], words: str) -> None:
    for asked in ("--help", "-h"):
        assert ts.main([*words.split(), asked]) == 0
        assert capsys.readouterr().out.startswith(f"usage: ts {words.split()[0]}")


def test_ctrl_c_is_one_line_and_the_shells_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenspeed.cli.eval_command.main", interrupted)
    assert ts.main(["eval", "--task", "choice"]) == 130
    assert capsys.readouterr().err == "ts eval: interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "tokenspeed.cli.ts", "serve", "--help"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, env=python_environment())
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, b"")


def test_help_of_serve_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert ts.main(["serve", "--help"]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out


def test_env_reports_versions_and_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert ts.main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"tokenspeed: {__version__}" in out and "usable cores" in out


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("ipc:///tmp/smg-zmq/ts0.ipc", 25152),
        ("ipc:///tmp/smg-zmq/ts1.ipc", 22735),
        ("ipc:///tmp/smg-zmq/engine-31000", 22714),
    ],
)
def test_the_handshake_port_of_an_ipc_path_is_the_protocols(url: str, port: int) -> None:
    assert zmq_handshake_port(url) == port


def test_worker_urls_of_two_servers_differ() -> None:
    assert fresh_worker_url() != fresh_worker_url()


@pytest.mark.parametrize("module", ["tokenspeed", "tokenspeed.cli.ts", "tokenspeed.cli.serve", "tokenspeed.cli.smg"])
def test_commands_start_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
