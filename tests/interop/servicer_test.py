# SPDX-License-Identifier: MIT
"""The released gRPC servicer runs our engine in its process, behind the released gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop import asking
from tests.interop.asking import Asker
from tests.support.peers import Http, Program, grpc_serves, released_gateway, released_servicer
from tests.support.processes import free_port


class Stack:
    def __init__(self, model_folder: Path) -> None:
        port, control, http_port = free_port(), free_port(), free_port()
        self.control = Http(control)
        self.servicer: Program = released_servicer(port, model_folder, "--rl-control-port", str(control))
        self.gateway = released_gateway(http_port, None, "--worker-urls", f"grpc://127.0.0.1:{port}")
        self.ask = Asker(http_port)
        self.servicer.wait_for(lambda: grpc_serves(port))
        self.gateway.wait_for(self.ask.serves)

    def is_idle(self) -> bool:
        load = self.control.get("/v1/loads")["loads"][0]
        return bool(load["num_reqs"] == 0 and load["num_pages"] == 0)


@pytest.fixture(scope="module")
def stack(model_folder: Path) -> Iterator[Stack]:
    running = Stack(model_folder)
    yield running
    running.gateway.kill()
    running.servicer.kill()


def test_it_chats_and_streams_the_same_text(stack: Stack) -> None:
    asking.check_chat(stack.ask)


def test_it_stops_at_a_string(stack: Stack) -> None:
    asking.check_stop_strings(stack.ask)


def test_it_tells_logprobs(stack: Stack) -> None:
    asking.check_logprobs(stack.ask)


def test_several_choices_differ(stack: Stack) -> None:
    answer = stack.ask.chat(n=3, temperature=1.2, seed=5)
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3


def test_it_flushes_the_prefix_cache(stack: Stack) -> None:
    asking.check_flush(stack.ask)


def test_a_client_that_leaves_frees_its_blocks(stack: Stack) -> None:
    asking.check_disconnect(stack.ask, stack.is_idle)


def test_what_the_engine_refuses_is_a_400_of_the_gateway(stack: Stack) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "not-a-type"}}}
    assert stack.ask.chat_status(response_format=form) == 400
    assert stack.ask.chat_status() == 200


def test_it_ends_on_sigterm(stack: Stack) -> None:
    assert stack.servicer.stop(60) == 0, stack.servicer.log()
