# SPDX-License-Identifier: MIT
"""The released gateway in front of our headless engine, over the ZMQ lane: tcp with one rank, ipc with two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop import asking
from tests.interop.lane import Lane, start
from tests.support.peers import released_gateway
from tests.support.processes import free_port, wait_until
from tokenspeed.cli._proc import fresh_worker_url, zmq_handshake_port


@pytest.fixture(scope="module")
def tcp(model_folder: Path) -> Iterator[Lane]:
    lane_port = free_port()
    yield from start(released_gateway, f"tcp://127.0.0.1:{lane_port}", lane_port, 1, model_folder)


@pytest.fixture(scope="module")
def ipc(model_folder: Path) -> Iterator[Lane]:
    url = fresh_worker_url()
    yield from start(released_gateway, url, zmq_handshake_port(url), 2, model_folder)


def test_it_chats_and_streams_the_same_text(tcp: Lane) -> None:
    asking.check_chat(tcp.ask)


def test_it_stops_at_a_string(tcp: Lane) -> None:
    asking.check_stop_strings(tcp.ask)


def test_it_tells_logprobs(tcp: Lane) -> None:
    asking.check_logprobs(tcp.ask)


def test_it_tells_the_logprobs_of_a_prompt(tcp: Lane) -> None:
    params = {"max_new_tokens": 3, "temperature": 0}
    body = {"text": "The capital of France is", "sampling_params": params, "return_logprob": True}
    status, answer = tcp.ask.http.post("/generate", body | {"logprob_start_len": 0})
    assert status == 200
    scores = answer["meta_info"]["input_token_logprobs"]
    assert len(scores) == answer["meta_info"]["prompt_tokens"]
    assert scores[0][0] is None and all(score[0] < 0 for score in scores[1:])


def test_a_client_that_leaves_frees_its_blocks(tcp: Lane) -> None:
    asking.check_disconnect(tcp.ask, tcp.is_idle)


def test_it_flushes_the_prefix_cache(tcp: Lane) -> None:
    asking.check_flush(tcp.ask)


def test_what_the_engine_refuses_is_a_400_of_the_gateway(tcp: Lane) -> None:
    schema = {"name": "bad", "schema": {"type": "not-a-type"}}
    assert tcp.ask.chat_status(response_format={"type": "json_schema", "json_schema": schema}) == 400
    assert tcp.ask.chat_status() == 200


def test_a_killed_engine_ends_its_streams_and_serves_again_when_restarted(tcp: Lane) -> None:
    response = tcp.ask.open_stream(max_tokens=1500, ignore_eos=True)
    response.readline()
    tcp.engines[0].kill()
    rest = response.read().decode()
    assert "error" in rest or '"finish_reason":"abort"' in rest
    wait_until(lambda: tcp.ask.http.status("/readiness") != 200, 30)
    tcp.engines[0].restart()
    tcp.wait_ready()
    assert "Paris" in asking.text_of(tcp.ask.chat())


def test_a_gateway_killed_in_a_stream_costs_nothing_and_the_engine_dials_the_next(tcp: Lane) -> None:
    response = tcp.ask.open_stream(max_tokens=1500, ignore_eos=True)
    response.readline()
    tcp.gateway.kill()
    wait_until(tcp.is_idle, 20)
    tcp.gateway.restart()
    tcp.wait_ready()
    assert "Paris" in asking.text_of(tcp.ask.chat())


def test_two_ranks_behind_one_ipc_lane_share_the_requests(ipc: Lane) -> None:
    for _ in range(4):
        asking.check_chat(ipc.ask)
    assert all("Finish!" in engine.log() for engine in ipc.engines)


def test_a_dead_rank_takes_its_lane_down_until_it_is_back(ipc: Lane) -> None:
    ipc.engines[1].kill()
    wait_until(lambda: ipc.ask.http.status("/readiness") != 200, 30)
    ipc.engines[1].restart()
    ipc.wait_ready()
    asking.check_chat(ipc.ask)
    asking.check_disconnect(ipc.ask, ipc.is_idle)
