# SPDX-License-Identifier: MIT
"""Two gateway processes on one port, as `smg launch` starts them, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import free_port, python_environment, wait_until
from tokenspeed.config.member import Member
from tokenspeed.gateway.http.admin import joined_loads
from tokenspeed.gateway.several.door import Door, Room
from tokenspeed.gateway.several.totals import added_up
from tokenspeed.gateway.testing.fake_engine import FakeEngine, Step
from tokenspeed.gateway.testing.running import ids, write_tokenizer
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput


class Gateways:
    """`smg launch --gateway-workers 2`, and one worker whose engine spells the prompt's last letter `max_tokens` times,
    a step every 5 ms."""

    def __init__(self, flags: Sequence[str] = (), num_workers: int = 1) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="gws")
        model = Path(self.folder.name, "model")
        model.mkdir()
        write_tokenizer(model)
        self.urls = [f"ipc://{self.folder.name}/lane/w{number}" for number in range(num_workers)]
        self.url = self.urls[0]
        self.port = free_port()
        words = ["-m", "tokenspeed.cli.smg", "launch", "--worker-urls", *self.urls, "--model-path", str(model)]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--gateway-workers", "2"]
        words += ["--history-backend", "memory", "--retry-max-retries", "1", *flags]
        self.headers: dict[str, str] = {}
        """Of every request."""
        self.worker_id = ""
        """That of the last answer."""
        env = python_environment()
        self.process = subprocess.Popen([sys.executable, *words], env=env)
        self.engine = FakeEngine(self.url, self._script)
        self.others = [FakeEngine(url, self._script) for url in self.urls[1:]]
        self.wait_ready()

    def _script(self, request: TokenizedGenerateReqInput) -> Iterator[Step]:
        letter = request.input_ids[-1 - len(ids("[assistant]")) - 1]
        limit = request.sampling_params.max_new_tokens or 1
        for number in range(limit):
            time.sleep(0.005 / max(1, self.engine.num_active))
            yield Step([letter], "length" if number == limit - 1 else "")

    def wait_ready(self) -> None:
        """Wait until both processes have the worker: connections are dealt out at random, so many are asked."""
        wait_until(lambda: self.num_listening() == 2)
        wait_until(lambda: all(self.status("/readiness") == 200 for _ in range(12)))

    def num_listening(self) -> int:
        """Sockets that take connections on the port."""
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        return sum(line.split()[1].endswith(f":{self.port:04X}") and line.split()[3] == "0A" for line in lines)

    def children(self) -> list[int]:
        """Process ids of the gateways."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """(status, body) of a request on a connection of its own."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, self.headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                self.worker_id = answer.headers["x-smg-routed-worker-id"]
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def status(self, path: str) -> int:
        """The status of a GET; 0 when nobody listens."""
        try:
            return self.ask("GET", path)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def chat(self, letter: str, max_tokens: int) -> str:
        """The text of a streamed answer, or the error."""
        messages = [{"role": "user", "content": letter}]
        body = {"messages": messages, "max_tokens": max_tokens, "stream": True}
        _, answer = self.ask("POST", "/v1/chat/completions", body)
        events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
        parsed: list[dict[str, Any]] = [json.loads(event) for event in events]
        return "".join(
            choice["delta"].get("content") or "" for event in parsed for choice in event.get("choices", [])
        ) + "".join(event["error"]["code"] for event in parsed if "error" in event)

    def listed(self) -> list[dict[str, Any]]:
        """The workers that all processes have: connections are dealt out at random, so many are asked."""
        views = [json.loads(self.ask("GET", "/workers")[1])["workers"] for _ in range(12)]
        seen = {json.dumps([{k: w[k] for k in ("id", "url", "state", "priority")} for w in view]) for view in views}
        return json.loads(seen.pop()) if len(seen) == 1 else [{"url": "they differ"}]

    def count(self, name: str) -> float:
        """The sum of a metric's series."""
        _, text = self.ask("GET", "/metrics")
        lines = [line for line in text.decode().splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def close(self) -> None:
        """End everything."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        for engine in (self.engine, *self.others):
            engine.stop()
        self.folder.cleanup()


@pytest.fixture(scope="module")
def running() -> Iterator[Gateways]:
    gateways = Gateways()
    yield gateways
    gateways.close()


def test_every_answer_is_its_own_and_metrics_are_those_of_both_processes(running: Gateways) -> None:
    before = running.count("smg_router_requests_total")
    with ThreadPoolExecutor(24) as pool:
        letters = [chr(ord("a") + number) for number in range(24)]
        texts = list(pool.map(lambda letter: running.chat(letter, 40), letters))
    assert texts == [letter * 40 for letter in letters]
    assert {running.count("smg_router_requests_total") - before for _ in range(8)} == {24}
    assert running.engine.num_active == 0


def test_a_client_that_leaves_is_told_to_the_engine(running: Gateways) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "q"}], "max_tokens": 4000, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        assert sock.recv(100)
    wait_until(lambda: running.engine.num_active == 0)


def test_calls_reach_the_engine_and_come_back(running: Gateways) -> None:
    assert running.ask("POST", "/flush_cache")[0] == 200
    running.engine.control_answer = (False, "busy")
    status, body = running.ask("POST", "/flush_cache")
    running.engine.control_answer = (True, "ok")
    assert status == 409 and b"busy" in body


def test_loads_are_those_of_both_processes_whichever_is_asked(running: Gateways) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(running.chat, "v", 400) for _ in range(8)]
        wait_until(lambda: running.engine.num_active == 8)

        def told() -> list[tuple[Any, ...]]:
            """What 12 connections hear, which are dealt out at random."""
            answers = [json.loads(running.ask("GET", "/get_loads")[1])["workers"] for _ in range(12)]
            return [(load["worker"], load["load"], *_numbers(load["ranks"])) for (load,) in answers]

        wait_until(lambda: told() == [(running.url, 8, 8, 8)] * 12)
        assert [answer.result(30) for answer in answers] == ["v" * 400] * 8


def _numbers(ranks: list[dict[str, Any]]) -> tuple[int, int]:
    """Of the one rank: requests in flight by the gateways, and those that it runs by itself."""
    (rank,) = ranks
    assert "told_s" not in rank
    return rank["in_flight"], rank["running"]


def test_a_background_response_is_seen_and_cancelled_from_any_process(running: Gateways) -> None:
    body = {"input": "z", "background": True, "store": True, "max_output_tokens": 4000}
    for _ in range(4):
        status, answer = running.ask("POST", "/v1/responses", body)
        assert status == 200, answer
        response_id = json.loads(answer)["id"]
        wait_until(lambda: running.engine.num_active == 1)
        assert json.loads(running.ask("GET", f"/v1/responses/{response_id}")[1])["status"] in ("queued", "in_progress")
        status, answer = running.ask("POST", f"/v1/responses/{response_id}/cancel", {})
        assert (status, json.loads(answer)["status"]) == (200, "cancelled")
        wait_until(lambda: running.engine.num_active == 0)


def test_a_killed_process_takes_its_own_requests_along_and_is_started_again(running: Gateways) -> None:
    texts: list[str] = []

    def chat() -> None:
        try:
            texts.append(running.chat("k", 300))
        except (OSError, http.client.HTTPException):
            texts.append("broken")

    threads = [threading.Thread(target=chat) for _ in range(16)]
    for thread in threads:
        thread.start()
    wait_until(lambda: running.engine.num_active == 16)
    victim = running.children()[0]
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    whole = [text for text in texts if text == "k" * 300]
    assert 0 < len(whole) < 16
    wait_until(lambda: running.engine.num_active == 0)
    wait_until(lambda: victim not in running.children())
    running.wait_ready()
    assert [running.chat("m", 3) for _ in range(8)] == ["mmm"] * 8


def test_an_engine_that_is_gone_is_503_in_every_process_until_it_is_back(running: Gateways) -> None:
    running.engine.vanish()
    wait_until(lambda: all(running.status("/readiness") == 503 for _ in range(12)))
    running.engine = FakeEngine(running.url, running._script)
    running.wait_ready()
    assert [running.chat("n", 2) for _ in range(8)] == ["nn"] * 8


def test_streams_finish_when_the_processes_are_told_to_stop(running: Gateways) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(running.chat, "s", 100) for _ in range(8)]
        wait_until(lambda: running.engine.num_active == 8)
        running.process.send_signal(signal.SIGTERM)
        assert [answer.result(30) for answer in answers] == ["s" * 100] * 8
    assert running.process.wait(30) == 0


def test_what_keeps_the_gateways_from_starting_is_said_once(tmp_path: Path) -> None:
    words = ["-m", "tokenspeed.cli.smg", "launch", "--worker-urls", f"ipc://{tmp_path}/w", "--gateway-workers", "3"]
    env = python_environment()
    model = ["--model-path", str(tmp_path / "nothing"), "--port", "0"]
    done = subprocess.run([sys.executable, *words, *model], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("smg launch: error: ") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = ["--host", "127.0.0.1", "--port", str(taken.getsockname()[1])]
        done = subprocess.run([sys.executable, *words, *port], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("cannot listen on")) == (1, 1)


def test_counts_are_added_and_what_all_say_of_a_worker_is_said_once() -> None:
    one = b'# TYPE smg_x_total counter\nsmg_x_total{a="1"} 2.0\n# TYPE smg_worker_health gauge\nsmg_worker_health 1.0\n'
    two = (
        b'# TYPE smg_x_total counter\nsmg_x_total{a="1"} 3.0\nsmg_x_total{a="2"} 1.0\n'
        b"# TYPE smg_worker_health gauge\nsmg_worker_health 1.0\n"
        b"# TYPE smg_x_created gauge\nsmg_x_created 1.7e9\n"
        b'# TYPE smg_t histogram\nsmg_t_bucket{le="+Inf"} 4.0\nsmg_t_count 4.0\nsmg_t_sum 2.5\n'
    )
    lines = added_up([one, two, two]).decode().splitlines()
    assert 'smg_x_total{a="1"} 8.0' in lines and 'smg_x_total{a="2"} 2.0' in lines
    assert "smg_worker_health 1.0" in lines
    assert not any("created" in line for line in lines)
    assert 'smg_t_bucket{le="+Inf"} 8.0' in lines and "smg_t_sum 5.0" in lines


def test_a_process_says_that_another_one_has_no_worker_yet(tmp_path: Path) -> None:
    async def asked() -> list[bool]:
        members = [Member(index, 3, str(tmp_path), 1) for index in range(3)]
        states = [True, False]
        doors = [
            Door(
                member,
                Room(
                    lambda: b"",
                    partial(states.__getitem__, member.index),
                    lambda: b"[]",
                    _nothing,
                    print,
                    print,
                    _nothing,
                ),
            )
            for member in members[:2]  # the third is being started again
        ]
        for door in doors:
            await door.open()
        found = [await doors[0].others_ready()]
        states[1] = True
        found.append(await doors[0].others_ready())
        await doors[1].close()
        found.append(await doors[0].others_ready())
        await doors[0].close()
        return found

    assert asyncio.run(asked()) == [False, True, True]


async def _nothing(name: str) -> None:
    """There are no background responses, and no workers."""


def _room(**parts: Any) -> Room:
    """A room in which there is nothing but `parts`."""
    nothing = Room(lambda: b"", lambda: True, lambda: b"[]", _nothing, print, print, _nothing)
    return dataclasses.replace(nothing, **parts)


def test_the_others_tell_their_loads_and_hear_of_empty_caches(tmp_path: Path) -> None:
    async def heard() -> tuple[list[bytes], list[list[str]]]:
        heard: list[list[str]] = []
        members = [Member(index, 3, str(tmp_path), 1) for index in range(3)]
        doors = [
            Door(
                member,
                Room(
                    lambda: b"",
                    lambda: True,
                    partial(str(member.index).encode),
                    _nothing,
                    heard.append,
                    print,
                    _nothing,
                ),
            )
            for member in members[:2]  # the third is being started again
        ]
        for door in doors:
            await door.open()
        loads = await doors[0].loads()
        await doors[0].tell_flushed(["w0", "w1"])
        for door in doors:
            await door.close()
        return loads, heard

    assert asyncio.run(heard()) == ([b"1"], [["w0", "w1"]])


def test_loads_are_added_and_what_an_engine_told_last_counts() -> None:
    def view(load: int, told_s: float, running: int) -> list[dict[str, Any]]:
        return [{"worker": "w", "load": load, "ranks": [_rank(0, load, told_s, running), _rank(1, 0, 1.0, 0)]}]

    def _rank(rank: int, in_flight: int, told_s: float, running: int) -> dict[str, Any]:
        return {"rank": rank, "in_flight": in_flight, "running": running, "told_s": told_s}

    other = [{"worker": "v", "load": 1, "ranks": []}]
    joined = joined_loads([view(2, 5.0, 9), [*view(3, 7.0, 4), *other], view(0, 6.0, 8)])
    assert joined == [*view(5, 7.0, 4), *other]
