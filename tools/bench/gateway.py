# SPDX-License-Identifier: MIT
"""Processor time and memory of a gateway, per request and per streamed token, beside the released Rust gateway.

Both are whole processes in front of the same scripted engine (`gateway_engine.py`), on the lane that the released
gateway speaks, and take turns in one run. Per token: the processor time of long streamed answers less that of streamed
answers of one token, over the tokens between. Per request: unary answers of eight tokens that come in one step; per
stream: those streamed answers of one token. The engine's pace keeps a gateway below its limit, so that nothing is saved
by falling behind: steps would be read together.

`python3 tools/bench/gateway.py --smg /path/to/venv/bin/smg --json` (`pip install tokenspeed-smg` into a venv of its
own); without `--smg` ours runs alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO

from tools.bench.gateway_engine import write_model
from tools.bench.gateway_load import Ask, run

HERE = Path(__file__).resolve().parent
STREAMS = (1, 16, 64, 256)
_START_S = 60.0
_PROMPT_WORDS = 60
_EFFORT, _WARM_UP = 512, 64
Numbers = dict[str, float]


class Processes:
    """The processor time and memory of a process and its children, from /proc."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def cpu_us(self) -> float:
        """Processor time of all threads up to now, in microseconds."""
        total_ns = 0
        for pid in self.tree():
            for thread in Path(f"/proc/{pid}/task").iterdir():
                total_ns += int((thread / "schedstat").read_text().split()[0])
        return total_ns / 1e3

    def rss_mb(self) -> float:
        """Resident memory in MB (10^6 bytes)."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.tree())
        return pages * os.sysconf("SC_PAGESIZE") / 1e6

    def tree(self) -> list[int]:
        """The process and all below it."""
        found = [self._pid]
        for pid in found:
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return found


class Bench:
    """A context manager: one gateway with the scripted engine behind it. `command` is the program and its flags."""

    def __init__(self, name: str, command: list[str], text: str) -> None:
        self.name = name
        self._command, self._text = command, text
        self._folder: tempfile.TemporaryDirectory[str]
        self._gateway: subprocess.Popen[bytes]
        self._engine: subprocess.Popen[str]
        self.port = 0
        self.model = ""

    def __enter__(self) -> Bench:
        self._folder = tempfile.TemporaryDirectory(prefix="gwbench")
        folder = Path(self._folder.name)
        model, url = folder / "model", f"ipc://{folder}/lane/w"
        model.mkdir()
        size = write_model(model, self._text)
        self.port = _free_port()
        flags = ["--worker-urls", url, "--backend", "tokenspeed", "--model-path", str(model), "--host", "127.0.0.1"]
        flags += ["--port", str(self.port), "--health-check-interval-secs", "1", "--log-level", "warn"]
        flags += ["--history-backend", "memory", "--prometheus-port", str(_free_port())]
        self._start([*self._command, "launch", *flags], [str(HERE / "gateway_engine.py"), url, str(size)])
        try:
            self._wait_ready()
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=5) as answer:
                self.model = json.load(answer)["data"][0]["id"]
        except BaseException:
            self._end()
            raise
        return self

    def _start(self, gateway: list[str], engine: list[str]) -> None:
        own = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # A peer lives in a venv of its own; our modules are none of its.
        foreign = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env = own if self._command == ours() else foreign
        with Path(self._folder.name, "log").open("wb") as log:
            self._gateway = subprocess.Popen(gateway, stdout=log, stderr=log, env=env)
        pipe = subprocess.PIPE
        self._engine = subprocess.Popen([sys.executable, *engine], stdin=pipe, stdout=pipe, text=True, env=own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        _pipe(self._engine.stdin).close()
        for child in (self._gateway, self._engine):
            child.terminate()
        for child in (self._gateway, self._engine):
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
        self._folder.cleanup()

    @property
    def processes(self) -> Processes:
        """The gateway's."""
        return Processes(self._gateway.pid)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._gateway.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readiness", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RuntimeError(f"{self.name} did not become ready: {Path(self._folder.name, 'log').read_text()[-2000:]}")

    def pace(self, step_s: float, tokens_per_step: int) -> None:
        """Set the engine's."""
        stdin = _pipe(self._engine.stdin)
        stdin.write(f"{step_s} {tokens_per_step}\n")
        stdin.flush()
        _pipe(self._engine.stdout).readline()

    def cost_us(self, ask: Ask, num_streams: int, per_stream: int) -> float:
        """Processor time of the gateway per request."""
        before_us = self.processes.cpu_us()
        num_requests = asyncio.run(run(self.port, ask, num_streams, per_stream, self._text))
        return (self.processes.cpu_us() - before_us) / num_requests

    def measure(self, num_streams: int, effort: int) -> Numbers:
        """One round at `num_streams`; effort: unary requests of the round, and what else there is in proportion."""
        tokens = max(effort // 4, effort // num_streams)
        self.pace(max(0.004, num_streams * 80e-6), 1)
        long_us = self.cost_us(self._ask(tokens, stream=True), num_streams, 1)
        short_us = self.cost_us(self._ask(1, stream=True), num_streams, max(2, effort // 8 // num_streams))
        self.pace(0.002, 8)
        unary_us = self.cost_us(self._ask(8, stream=False), num_streams, max(4, effort // num_streams))
        return {
            "us_per_token": (long_us - short_us) / (tokens - 1),
            "us_per_request": unary_us,
            "us_per_stream": short_us,
            "rss_mb": self.processes.rss_mb(),
        }

    def _ask(self, max_tokens: int, *, stream: bool) -> Ask:
        return Ask(self.model, _PROMPT_WORDS, max_tokens, stream)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # both ends of the engine are pipes
    return pipe


def ours() -> list[str]:
    """The command of our gateway, from this tree."""
    return [sys.executable, "-m", "tokenspeed.cli.smg"]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def bench(commands: dict[str, list[str]], streams: list[int], rounds: int, text: str) -> dict[str, dict[str, Numbers]]:
    """{gateway: {streams: numbers}}: medians of the rounds, in which the gateways take turns."""
    results: dict[str, dict[str, Numbers]] = {name: {} for name in commands}
    benches = [Bench(name, command, text) for name, command in commands.items()]
    for number in streams:
        seen: dict[str, list[Numbers]] = {name: [] for name in commands}
        for _ in range(rounds):
            for one in benches:
                # A fresh process a round, so that memory is that of this many streams.
                with one:
                    one.measure(4, _WARM_UP)
                    seen[one.name].append(one.measure(number, _EFFORT))
        for name, all_numbers in seen.items():
            results[name][str(number)] = {
                key: round(statistics.median(numbers[key] for numbers in all_numbers), 2) for key in all_numbers[0]
            }
            print(f"{name:5} {number:4} streams: {results[name][str(number)]}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smg", help="the released gateway's program; without it ours runs alone")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    commands = {"ours": ours()}
    if arguments.smg:
        commands["smg"] = [arguments.smg]
    text = (HERE.parents[1] / "tests/perplexity/conversation.txt").read_text(encoding="utf-8")
    results = bench(commands, arguments.streams, arguments.rounds, text)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
