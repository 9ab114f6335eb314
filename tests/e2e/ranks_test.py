# SPDX-License-Identifier: MIT
"""A server of two ranks beside one of one: the same answers through the whole path, and what becomes of lost ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.watching import gauge, long_stream
from tests.support.processes import free_port, python_environment, wait_until
from tests.support.server import Server

LONG = "The history of the sea, as the old sailors told it, begins with a storm. " * 40
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "The capital of France is", "temperature": 0},
    "several choices": {"prompt": "Once upon a time", "temperature": 1.1, "seed": 5, "n": 3},
    "every transform": {
        "prompt": "1, 2, 3, 4, 5,",
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.01,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
        "logit_bias": {"20": 2.0},
        "seed": 8,
    },
    "a prompt of several chunks": {"prompt": LONG, "temperature": 0},
    "a regular expression": {"prompt": "Call me at", "temperature": 0.7, "seed": 3, "regex": " [0-9]{3}-[0-9]{4}"},
    "a schema": {
        "prompt": "A person as JSON: ",
        "temperature": 0,
        "max_tokens": 48,
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
    },
}


@pytest.fixture(scope="module")
def two() -> Iterator[Server]:
    flags = ("--max-model-len", "2048", "--max-num-seqs", "16", "--max-total-tokens", "16384")
    with Server(*flags, "--tensor-parallel-size", "2") as running:
        yield running


def complete(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = server.post("/v1/completions", {"max_tokens": 16, "logprobs": 2, **body})
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("name", BODIES)
def test_two_ranks_answer_as_one_cold_and_from_the_cache(server: Server, two: Server, name: str) -> None:
    for _ in range(2):
        one, other = complete(server, BODIES[name]), complete(two, BODIES[name])
        assert [choice["text"] for choice in other["choices"]] == [choice["text"] for choice in one["choices"]]
        for mine, theirs in zip(one["choices"], other["choices"]):
            assert theirs["finish_reason"] == mine["finish_reason"]
            assert theirs["logprobs"]["tokens"] == mine["logprobs"]["tokens"]
            found, expected = theirs["logprobs"]["token_logprobs"], mine["logprobs"]["token_logprobs"]
            assert found == pytest.approx(expected, abs=1e-4)
        assert other["usage"]["completion_tokens"] == one["usage"]["completion_tokens"]
    cached = other["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0, "the second time some of it was there"
    if "schema" in name:
        assert json.loads(other["choices"][0]["text"])["age"] <= 99


def test_streams_that_run_together_are_those_that_run_alone(two: Server) -> None:
    client = openai.OpenAI(base_url=two.base_url + "/v1", api_key="unused", max_retries=0)
    model = client.models.list().data[0].id
    params: dict[str, Any] = {"model": model, "max_tokens": 16, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    prompts = [f"{number} green bottles" for number in range(4)]
    alone = [
        client.completions.create(prompt=prompt, seed=seed, **params).choices[0].text
        for seed, prompt in enumerate(prompts)
    ]
    together: dict[int, str] = {}

    def stream(seed: int, prompt: str) -> None:
        chunks = client.completions.create(prompt=prompt, seed=seed, stream=True, **params)
        together[seed] = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    threads = [threading.Thread(target=stream, args=pair) for pair in enumerate(prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [together[seed] for seed in range(len(prompts))] == alone


def test_clients_that_leave_free_their_blocks_on_every_rank(two: Server) -> None:
    client = openai.OpenAI(base_url=two.base_url + "/v1", api_key="unused", max_retries=0)
    model = client.models.list().data[0].id
    streams = [long_stream(client, model) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.close()
    wait_until(lambda: gauge(two, "tokenspeed:num_requests_running") == 0, 30)
    wait_until(lambda: gauge(two, "tokenspeed:kv_cache_usage_perc") == 0, 30)
    # A rank whose blocks were not free would plan other steps from here on, and end the engine in words.
    assert complete(two, BODIES["greedy"])["choices"][0]["finish_reason"] == "length"
    assert "all ranks must take the same steps" not in two.log()


def ranks_of(server: Server) -> list[psutil.Process]:
    """The first rank and the other one."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    words = ("--headless", "tokenspeed.engine.follower")
    return [child for word in words for child in children if word in child.cmdline()]


def end_of_a_stream_when(server: Server, kill: Any) -> None:
    """A stream that is open when `kill` is called ends with an error."""
    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="unused", max_retries=0)
    stream = iter(long_stream(client, client.models.list().data[0].id))
    next(stream)
    kill()
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        for _ in stream:
            pass


def test_a_killed_rank_ends_its_streams_and_all_ranks_are_started_again(two: Server) -> None:
    first, other = ranks_of(two)
    end_of_a_stream_when(two, other.kill)
    wait_until(lambda: "ready again after" in two.log(), 90, two.log)
    assert "rank 1 ended (signal 9)" in two.log()
    assert not first.is_running()
    assert complete(two, BODIES["greedy"])["choices"][0]["finish_reason"] == "length"
    assert gauge(two, "tokenspeed:num_requests_running") == 0


def test_a_killed_first_rank_leaves_no_other_behind_and_sigterm_ends_what_is_there(two: Server) -> None:
    first, other = ranks_of(two)
    end_of_a_stream_when(two, first.kill)
    wait_until(lambda: not other.is_running(), 20)
    two.terminate()
    assert two.wait() == 0
    assert not [process for process in (first, other) if process.is_running()]


def test_ranks_that_cannot_share_the_model_are_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "tokenspeed.cli.ts", "serve", "--tp", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "--tensor-parallel-size: 9 heads over 3 KV heads do not divide among 5 ranks" in line


def test_two_replicas_share_the_requests_and_end_and_return_together() -> None:
    flags = ("--max-model-len", "1024", "--max-num-seqs", "8", "--max-total-tokens", "8192")
    with Server(*flags, "--data-parallel-size", "2") as own:
        answers: list[str] = []

        def ask() -> None:
            body = {**BODIES["greedy"], "max_tokens": 32, "ignore_eos": True}
            answers.append(complete(own, body)["choices"][0]["text"])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(answers) == 4 and len(set(answers)) == 1
        for rank in (0, 1):
            assert f"Prefill batch. #dp-rank: {rank}" in own.log()
        control = f"http://127.0.0.1:{own.control_port}"
        assert [load["dp_rank"] for load in httpx.get(control + "/v1/loads").json()["loads"]] == [0, 1]
        metrics = httpx.get(control + "/metrics").text
        served = [line for line in metrics.splitlines() if line.startswith("tokenspeed:generation_tokens_total{")]
        assert [line.rpartition(" ")[2] for line in served] == ["64.0", "64.0"], metrics
        assert httpx.post(control + "/flush_cache", json={}).status_code == 200

        replicas = [p for p in psutil.Process(own.process.pid).children(True) if "--data-parallel-rank" in p.cmdline()]
        assert len(replicas) == 2
        end_of_a_stream_when(own, lambda: [replica.kill() for replica in replicas[:1]])
        wait_until(lambda: "ready again after" in own.log(), 90, own.log)
        assert complete(own, BODIES["greedy"])["choices"][0]["text"]
        assert not [replica for replica in replicas if replica.is_running()]


def test_two_machines_share_a_model_and_a_node_comes_back_after_a_loss() -> None:
    flags = ["--max-model-len", "1024", "--max-num-seqs", "8", "--max-total-tokens", "8192"]
    flags += ["--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    environment = python_environment()
    command = [sys.executable, "-m", "tokenspeed.cli.ts", "serve", *flags, "--node-rank", "1"]
    node = subprocess.Popen(command, env=environment)
    try:
        with Server(*flags) as own:
            before = complete(own, BODIES["greedy"])["choices"][0]["text"]
            end_of_a_stream_when(own, psutil.Process(node.pid).children()[0].kill)
            wait_until(lambda: "ready again after" in own.log(), 90, own.log)
            assert complete(own, BODIES["greedy"])["choices"][0]["text"] == before
            own.terminate()
            assert own.wait() == 0
        assert node.wait(30) == 0, "the node ends with the engine"
    finally:
        node.kill()
