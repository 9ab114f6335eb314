# SPDX-License-Identifier: MIT
"""The released gateway in front of our gRPC servers: one, and two that it steers by their KV events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop import asking
from tests.interop.asking import Asker
from tests.interop.lane import Workers
from tests.support.peers import grpc_serves, peers_site, released_gateway
from tests.support.processes import free_port, wait_until


@pytest.fixture(scope="module")
def one() -> Iterator[Workers]:
    """The gateway has no files of the model: the tokenizer is streamed to it."""
    workers = Workers(released_gateway, 1, None)
    yield workers
    workers.stop()


@pytest.fixture(scope="module")
def two(model_folder: Path) -> Iterator[Workers]:
    workers = Workers(released_gateway, 2, model_folder, "--policy", "cache_aware", "--block-size", "16")
    yield workers
    workers.stop()


def test_it_chats_with_the_tokenizer_that_the_engine_streams(one: Workers) -> None:
    asking.check_chat(one.ask)


def test_it_stops_at_a_string(one: Workers) -> None:
    asking.check_stop_strings(one.ask)


def test_it_tells_logprobs(one: Workers) -> None:
    asking.check_logprobs(one.ask)


def test_several_choices_differ(one: Workers) -> None:
    answer = one.ask.chat(n=3, temperature=1.2, seed=5)
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3


def test_a_schema_is_kept(one: Workers) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    text = asking.text_of(one.ask.chat(response_format=form, max_tokens=60))
    assert text.replace(" ", "").replace("\n", "") == '{"n":7}'


def test_a_client_that_leaves_frees_its_blocks(one: Workers) -> None:
    asking.check_disconnect(one.ask, one.is_idle)


def test_it_flushes_the_prefix_cache(one: Workers) -> None:
    asking.check_flush(one.ask)


def test_what_the_engine_refuses_is_a_400_of_the_gateway(one: Workers) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "not-a-type"}}}
    assert one.ask.chat_status(response_format=form) == 400
    assert one.ask.chat_status() == 200


def test_it_shows_the_load(one: Workers) -> None:
    assert '"max_total_num_tokens": 8192' in json.dumps(one.ask.http.get("/get_loads"))


def test_a_killed_engine_ends_its_streams_and_serves_again_when_restarted(one: Workers) -> None:
    response = one.ask.open_stream(max_tokens=1500, ignore_eos=True)
    response.readline()
    one.engines[0].kill()
    assert "error" in response.read().decode()
    one.engines[0].restart()
    one.engines[0].wait_for(lambda: grpc_serves(one.ports[0]))
    one.wait_ready()
    asking.check_chat(one.ask)


def test_kv_events_steer_a_prompt_to_the_worker_that_has_it(two: Workers, model_folder: Path) -> None:
    """Another gateway puts a prompt into one worker's cache; its events alone can tell of it."""
    for favoured in (1, 0):
        messages = [{"role": "user", "content": f"Story {favoured}. " + "The quick brown fox jumps. " * 40}]
        http_port = free_port()
        with released_gateway(http_port, model_folder, "--worker-urls", two.url(favoured)) as other:
            asker = Asker(http_port)
            other.wait_for(lambda asker=asker: asker.serves())  # type: ignore[misc]
            asker.chat(messages=messages, max_tokens=1)
            other.kill()
        answer = two.ask.chat(messages=messages, max_tokens=1)
        assert asking.cached_tokens(answer) > 200
        for control in two.controls:
            wait_until(lambda control=control: control.post("/flush_cache", {})[0] == 200, 20)  # type: ignore[misc]


def test_the_table_of_the_released_protocol_is_that_of_the_installed_package() -> None:
    path = Path(__file__).parents[2] / "protos"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(peers_site()), *[entry for entry in sys.path if entry]])}
    command = [sys.executable, str(path / "wire_test.py"), "smg_grpc_proto.generated"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    table = (path / "testdata" / "released_wire.tsv").read_text().splitlines()
    assert sorted(done.stdout.splitlines()) == sorted(line for line in table if not line.startswith("#"))


def test_a_sigterm_lets_streams_finish(one: Workers) -> None:
    response = one.ask.open_stream(max_tokens=200, ignore_eos=True)
    response.readline()
    one.engines[0].process.terminate()
    assert "data: [DONE]" in response.read().decode()
    assert one.engines[0].process.wait(60) == 0
