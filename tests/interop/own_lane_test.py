# SPDX-License-Identifier: MIT
"""Our gateway in front of our engines: the same questions as to the released one, over tcp with two ranks, and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop import asking
from tests.interop.lane import Lane, Workers, start
from tests.support.peers import grpc_serves, own_gateway
from tests.support.processes import free_port, wait_until


@pytest.fixture(scope="module")
def lane(model_folder: Path) -> Iterator[Lane]:
    lane_port = free_port()
    yield from start(own_gateway, f"tcp://127.0.0.1:{lane_port}", lane_port, 2, model_folder)


@pytest.fixture(scope="module")
def workers(model_folder: Path) -> Iterator[Workers]:
    running = Workers(own_gateway, 1, model_folder, "--backend", "tokenspeed")
    yield running
    running.stop()


def test_it_answers_as_the_released_one_does(lane: Lane) -> None:
    for _ in range(3):
        asking.check_chat(lane.ask)
    assert all("Finish!" in engine.log() for engine in lane.engines)
    asking.check_stop_strings(lane.ask)
    asking.check_logprobs(lane.ask)
    asking.check_disconnect(lane.ask, lane.is_idle)


def test_a_rank_killed_in_streams_ends_each_once_and_all_serve_again_when_it_is_back(lane: Lane) -> None:
    streams = [lane.ask.open_stream(max_tokens=1500, ignore_eos=True) for _ in range(4)]
    for stream in streams:
        stream.readline()
    lane.engines[1].kill()
    for stream in streams:
        rest = stream.read().decode()
        assert rest.count('"error"') == 1 and '"finish_reason":"' not in rest
    wait_until(lambda: lane.ask.http.status("/readiness") == 503, 30)
    lane.engines[1].restart()
    lane.wait_ready()
    wait_until(lane.is_idle, 20)
    asking.check_chat(lane.ask)


def test_a_gateway_killed_in_a_stream_costs_nothing_and_its_engines_dial_the_next(lane: Lane) -> None:
    stream = lane.ask.open_stream(max_tokens=1500, ignore_eos=True)
    stream.readline()
    lane.gateway.kill()
    wait_until(lane.is_idle, 20)
    lane.gateway.restart()
    lane.wait_ready()
    asking.check_chat(lane.ask)


def test_it_answers_the_same_over_grpc(workers: Workers) -> None:
    asking.check_chat(workers.ask)
    asking.check_stop_strings(workers.ask)
    asking.check_logprobs(workers.ask)
    asking.check_flush(workers.ask)
    asking.check_disconnect(workers.ask, workers.is_idle)


def test_prompt_logprobs_and_choices_go_over_grpc(workers: Workers) -> None:
    body = {"model": workers.ask.model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    status, answer = workers.ask.http.post("/v1/completions", body | {"echo": True, "logprobs": 1})
    assert status == 200, answer
    scores = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[0] is None and all(score <= 0 for score in scores[1:]) and len(scores) == 6
    several = workers.ask.chat(n=3, temperature=1.2, seed=5)
    assert len({choice["message"]["content"] for choice in several["choices"]}) == 3


def test_an_engine_killed_in_a_stream_ends_it_once_and_its_successor_serves(workers: Workers) -> None:
    stream = workers.ask.open_stream(max_tokens=1500, ignore_eos=True)
    stream.readline()
    workers.engines[0].kill()
    assert stream.read().decode().count('"error"') == 1
    workers.engines[0].restart()
    workers.engines[0].wait_for(lambda: grpc_serves(workers.ports[0]))
    workers.wait_ready()
    asking.check_chat(workers.ask)
