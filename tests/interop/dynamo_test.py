# SPDX-License-Identifier: MIT
"""Dynamo's frontend in front of its workers on our package: discovery by files, routing by KV events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop import asking
from tests.interop.asking import Asker
from tests.support.peers import Http, Program
from tests.support.processes import free_port, wait_until

BLOCK_SIZE = "16"
# Prompts of some hundred tokens: computed, and found in the cache.
COMPUTED, CACHED = r"#new-token: [2-9]\d\d", r"#cached-token: [2-9]\d\d"


class Dynamo:
    def __init__(self, model_folder: Path, store: Path) -> None:
        self._env = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(store),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
        }
        self._model_folder = model_folder
        self.workers: list[Program] = []
        self.controls: list[Http] = []
        port = free_port()
        flags = ["--http-port", str(port), "--router-mode", "kv", "--kv-cache-block-size", BLOCK_SIZE]
        self.frontend = Program("dynamo.frontend", *flags, peer=True, env=self._env)
        self.ask = Asker(port)

    def start_worker(self) -> None:
        control = free_port()
        sizes = ["--max-model-len", "2048", "--max-num-seqs", "8", "--max-total-tokens", "8192", "--num-threads", "2"]
        flags = ["--block-size", BLOCK_SIZE, "--rl-control-port", str(control), *sizes]
        events = ["--kv-events-config", '{"enable_kv_cache_events": true}']
        model = ["--model", str(self._model_folder), "--served-model-name", "smol"]
        self.workers.append(Program("dynamo.tokenspeed", *model, *flags, *events, peer=True, env=self._env))
        self.controls.append(Http(control))
        self.workers[-1].wait_for(lambda: self.controls[-1].status("/health") == 200)

    def is_idle(self) -> bool:
        loads = [control.get("/v1/loads")["loads"][0] for control in self.controls]
        return all(load["num_reqs"] == 0 and load["num_pages"] == 0 for load in loads)

    def counts(self, pattern: str) -> list[int]:
        """How often each worker has logged it."""
        return [len(re.findall(pattern, worker.log())) for worker in self.workers]

    def stop(self) -> None:
        for program in [self.frontend, *self.workers]:
            program.kill()


@pytest.fixture(scope="module")
def dynamo(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dynamo]:
    running = Dynamo(model_folder, tmp_path_factory.mktemp("store"))
    try:
        running.start_worker()
        running.frontend.wait_for(lambda: running.ask.has_model() and running.ask.chat_status(max_tokens=1) == 200)
        yield running
    finally:
        running.stop()


def test_one_worker_chats_and_streams_the_same_text(dynamo: Dynamo) -> None:
    asking.check_chat(dynamo.ask)


def test_it_stops_at_a_string(dynamo: Dynamo) -> None:
    asking.check_stop_strings(dynamo.ask)


def test_a_client_that_leaves_frees_its_blocks(dynamo: Dynamo) -> None:
    asking.check_disconnect(dynamo.ask, dynamo.is_idle)


def test_kv_events_lead_a_prompt_back_to_the_worker_that_has_it(dynamo: Dynamo) -> None:
    """A story that is told while the first worker is busy lands on the second, and is found there afterwards."""
    dynamo.start_worker()
    for number in range(20):
        story = [{"role": "user", "content": f"Story {number}. " + "The quick brown fox jumps. " * 40}]
        busy = [dynamo.ask.open_stream(max_tokens=1500, ignore_eos=True) for _ in range(3)]
        computed = dynamo.counts(COMPUTED)
        dynamo.ask.chat(messages=story, max_tokens=1)
        for stream in busy:
            stream.close()
        wait_until(dynamo.is_idle, 20)
        if dynamo.counts(COMPUTED)[1] > computed[1]:
            break
    before = dynamo.counts(CACHED)
    for _ in range(3):
        dynamo.ask.chat(messages=story, max_tokens=1)
    assert [after - own for own, after in zip(before, dynamo.counts(CACHED))] == [0, 3]


def test_a_killed_worker_costs_its_streams_and_the_other_serves_on(dynamo: Dynamo) -> None:
    response = dynamo.ask.open_stream(max_tokens=1500, ignore_eos=True)
    response.readline()
    wait_until(lambda: not dynamo.is_idle(), 20)
    loads = [control.get("/v1/loads")["loads"][0]["num_reqs"] for control in dynamo.controls]
    busy = loads.index(1)
    dynamo.workers.pop(busy).kill()
    dynamo.controls.pop(busy)
    response.read()
    # The frontend offers requests to the dead one for a while; then it has forgotten it.
    wait_until(lambda: all(dynamo.ask.chat_status(max_tokens=1) == 200 for _ in range(4)), 60)
    asking.check_chat(dynamo.ask)
    wait_until(dynamo.is_idle, 20)
