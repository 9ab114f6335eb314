# SPDX-License-Identifier: MIT
"""Our gateway in front of our headless engines: the same questions as to the released one, over tcp with two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop import asking
from tests.interop.asking import wait_until
from tests.interop.lane import Lane, start
from tests.support.peers import own_gateway
from tests.support.server import free_port


@pytest.fixture(scope="module")
def lane(model_folder: Path) -> Iterator[Lane]:
    lane_port = free_port()
    yield from start(own_gateway, f"tcp://127.0.0.1:{lane_port}", lane_port, 2, model_folder)


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
