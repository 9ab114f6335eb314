# SPDX-License-Identifier: MIT
"""Our gateway whose engine sends garbage or loses results: an answer is right or an error, and the next one works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fault.garbage import mutations
from tests.fault.raw_lane import RawEngine
from tests.support.peers import Http, Program, write_model_folder
from tests.support.processes import free_port
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.testing import READY

BODY = {"model": "m", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
TOKENS = (504, 3575, 282, 4649)


class Stack:
    """Our gateway and a bare engine that is registered with it."""

    def __init__(self, model_folder: Path) -> None:
        self.lane_port, http_port = free_port(), free_port()
        self.http = Http(http_port)
        words = ["--worker-urls", f"tcp://127.0.0.1:{self.lane_port}", "--backend", "tokenspeed", "--disable-retries"]
        ports = ["--host", "127.0.0.1", "--port", str(http_port), "--model-path", str(model_folder)]
        self.gateway = Program("tokenspeed.cli.smg", "launch", *words, *ports)
        self.engine = self.dial()

    def dial(self) -> RawEngine:
        engine = RawEngine(self.lane_port)
        engine.register(wire.encode(msgspec.structs.replace(READY, max_model_len=2048, instance_id="m")))
        self.gateway.wait_for(lambda: self.http.status("/readiness") == 200)
        return engine

    def ask(self) -> Asked:
        return Asked(self.http)

    def next_request(self) -> str:
        """The id of the next request that reaches the engine."""
        while True:
            message = wire.decode_engine_message(self.engine.receive())
            if isinstance(message, wire.AddRequest):
                return message.request.rid


class Asked:
    """A completion on its way."""

    def __init__(self, http: Http) -> None:
        self.answers: list[tuple[int, Any]] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(http.post("/v1/completions", BODY)))
        self._thread.start()

    def answer(self) -> tuple[int, Any]:
        self._thread.join(60)
        assert len(self.answers) == 1, "no answer, or more than one"
        return self.answers[0]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder)
    running = Stack(folder)
    yield running
    running.engine.close()
    running.gateway.kill()


def result(rid: str, tokens: tuple[int, ...], total: int, finish: str) -> bytes:
    """A batch of one row; total: tokens of the request so far."""
    return wire.encode(
        wire.BatchTokenIDOutSlim(
            rids=[rid],
            output_ids=[list(tokens)],
            finished_reasons=[finish],  # type: ignore[list-item]
            prompt_tokens=[1],
            completion_tokens=[total],
            cached_tokens=[0],
            output_token_logprobs_val=[[]],
            output_token_logprobs_idx=[[]],
        )
    )


def test_garbage_between_results_changes_no_answer(stack: Stack) -> None:
    asked = stack.ask()
    rid = stack.next_request()
    sound = result("somebody else", TOKENS, 4, "length")
    for count, token in enumerate(TOKENS, 1):
        for garbage in mutations(sound, 100, seed=count):
            if garbage:
                stack.engine.push(garbage)
        stack.engine.push(result(rid, (token,), count, "length" if count == 4 else ""))
    status, answer = asked.answer()
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 4
    assert stack.http.status("/readiness") == 200


def test_an_answer_with_a_hole_in_it_is_an_error_and_the_next_one_is_whole(stack: Stack) -> None:
    asked = stack.ask()
    rid = stack.next_request()
    stack.engine.push(result(rid, TOKENS[:1], 1, ""))
    stack.engine.push(result(rid, TOKENS[3:], 4, "length"))  # two tokens were lost on the way
    status, answer = asked.answer()
    assert status == 503, answer
    assert answer["error"]["code"] == "worker_lost"
    again = stack.ask()
    stack.engine.push(result(stack.next_request(), TOKENS, 4, "length"))
    assert again.answer()[0] == 200


def test_an_engine_that_vanishes_fails_its_requests_once_and_its_successor_serves(stack: Stack) -> None:
    asked = [stack.ask() for _ in range(3)]
    for _ in asked:
        stack.next_request()
    stack.engine.close()
    assert [entry.answer()[0] for entry in asked] == [503] * 3
    stack.engine = stack.dial()
    again = stack.ask()
    stack.engine.push(result(stack.next_request(), TOKENS, 4, "length"))
    assert again.answer()[0] == 200
