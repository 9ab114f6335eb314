# SPDX-License-Identifier: MIT
"""What happens when a client leaves, when the server is asked to stop, and when a process dies."""

from __future__ import annotations

import signal
import threading
import time

import httpx
import openai
import psutil
import pytest

from tests.e2e.watching import gauge, long_stream
from tests.support.processes import wait_until
from tests.support.server import Server

SMALL = ("--max-model-len", "1024", "--max-num-seqs", "16", "--max-total-tokens", "8192")


def test_a_client_that_leaves_frees_its_blocks(server: Server, client: openai.OpenAI, model: str) -> None:
    streams = [long_stream(client, model) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    wait_until(lambda: gauge(server, "tokenspeed:num_requests_running") >= 4, 10)
    for stream in streams:
        stream.close()
    wait_until(lambda: gauge(server, "tokenspeed:num_requests_running") == 0, 20)
    wait_until(lambda: gauge(server, "tokenspeed:kv_cache_usage_perc") == 0, 20)


def test_a_client_that_leaves_before_the_answer_frees_its_blocks(server: Server, model: str) -> None:
    body = {"model": model, "prompt": "Tell me everything.", "max_tokens": 900, "ignore_eos": True}
    try:
        httpx.post(server.base_url + "/v1/completions", json=body, timeout=1.0)
    except httpx.TimeoutException:
        pass
    wait_until(lambda: gauge(server, "tokenspeed:num_requests_running") == 0, 20)
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})[0] == 200


def test_sigterm_turns_readiness_at_once_lets_streams_finish_and_exits_zero() -> None:
    with Server(*SMALL, "--drain-timeout", "120") as own:
        client = openai.OpenAI(base_url=own.base_url + "/v1", api_key="unused", max_retries=0)
        model = client.models.list().data[0].id
        results: list[tuple[int, str | None]] = []

        def consume() -> None:
            chunks = [chunk for chunk in long_stream(client, model, max_tokens=150) if chunk.choices]
            results.append((len(chunks), chunks[-1].choices[0].finish_reason))

        threads = [threading.Thread(target=consume) for _ in range(10)]
        for thread in threads:
            thread.start()
        wait_until(lambda: gauge(own, "tokenspeed:num_requests_running") >= 10, 20)
        own.terminate()
        wait_until(lambda: own.status("/readiness") in (503, None), 2)
        for thread in threads:
            thread.join(150)
        assert [reason for _, reason in results] == ["length"] * 10
        assert own.wait() == 0


def child_process(server: Server, word: str) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if word in child.cmdline())


def cut_off(server: Server, word: str) -> float:
    """Kill the child whose command line has `word` in the middle of a stream; seconds until the stream has ended."""
    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="unused", max_retries=0)
    stream = iter(long_stream(client, client.models.list().data[0].id))
    next(stream)
    child_process(server, word).send_signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        for _ in stream:
            pass
    return time.monotonic() - started


@pytest.mark.parametrize("word", ["--headless", "launch"])
def test_a_killed_child_ends_its_streams_once_and_is_started_again(word: str) -> None:
    with Server(*SMALL) as own:
        assert cut_off(own, word) < 20
        if word == "--headless":
            assert own.status("/readiness") == 503, "no engine, no readiness"
        wait_until(lambda: "ready again after" in own.log(), 60, own.log)
        assert own.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})[0] == 200
        assert gauge(own, "tokenspeed:num_requests_running") == 0
        own.terminate()
        assert own.wait() == 0


def test_without_restarts_a_killed_engine_ends_the_server_and_leaves_nobody_behind() -> None:
    with Server(*SMALL, "--engine-restarts", "0") as own:
        tree = psutil.Process(own.process.pid).children(recursive=True)
        assert cut_off(own, "--headless") < 20
        wait_until(lambda: own.process.poll() is not None, 60)
        assert own.process.returncode != 0 and "engine" in own.log()
        gone, alive = psutil.wait_procs(tree, timeout=20)
        assert not alive, f"left behind: {alive}, ended: {gone}"
