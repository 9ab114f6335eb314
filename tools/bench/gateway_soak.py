# SPDX-License-Identifier: MIT
"""A load test of a whole gateway: many streams at once, of which some clients leave in the middle without a word.

Every client asks again as soon as its answer has ended or it has left, until the time is over. At the end nothing may
be left of them: no request in flight at the gateway, none at the engine, no open descriptor, no answer of 5xx on the
way, and no more memory than in the first third of the time, but for a tenth.

`python3 tools/bench/gateway_soak.py --streams 1000 --seconds 60`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tools.bench.gateway import Bench, ours
from tools.bench.gateway_load import Ask

_LEAVES = 0.3
"""Share of the requests whose client leaves before the end."""
_SETTLE_S = 20.0
_GROWTH, _SLACK_MB = 1.1, 8.0


@dataclass
class Report:
    """What happened. `ends`: finished, left, or what went wrong, with counts."""

    ends: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    early_mb: float = 0.0
    late_mb: float = 0.0
    peak_mb: float = 0.0
    left_over: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """What a gateway must not do, in words."""
        found = [f"{count} requests: {end}" for end, count in self.ends.items() if end not in ("finished", "left")]
        found += [f"{count} {what} left over" for what, count in self.left_over.items() if count]
        if self.late_mb > self.early_mb * _GROWTH + _SLACK_MB:
            found.append(f"memory grew from {self.early_mb:.0f} to {self.late_mb:.0f} MB")
        return found


class Soak:
    """Clients of one running gateway."""

    def __init__(self, bench: Bench, text: str, seed: int) -> None:
        self._bench, self._text = bench, text
        self._random = random.Random(seed)
        self._number = 0
        self._until_s = 0.0
        self.report = Report()

    async def run(self, num_streams: int, seconds: float) -> None:
        """Load the gateway for that long, then wait until it has nothing left to do."""
        begun_s = time.monotonic()
        self._until_s = begun_s + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(begun_s + seconds / 3))
            for _ in range(num_streams):
                group.create_task(self._client())

    async def _watch(self, early_s: float) -> None:
        report = self.report
        while time.monotonic() < self._until_s:
            now_mb = self._bench.processes.rss_mb()
            report.peak_mb = max(report.peak_mb, now_mb)
            if time.monotonic() < early_s:
                report.early_mb = max(report.early_mb, now_mb)
            report.late_mb = now_mb
            await asyncio.sleep(0.2)

    async def _client(self) -> None:
        while time.monotonic() < self._until_s:
            try:
                self.report.ends[await self._request()] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                self.report.ends[f"the connection broke: {type(error).__name__}"] += 1

    async def _request(self) -> str:
        """One request on a connection of its own; how it ended."""
        self._number += 1
        max_tokens = self._random.randint(4, 60)
        body = Ask(self._bench.model, 40, max_tokens, True).body(self._number, self._text)
        stays = self._random.random() >= _LEAVES
        reader, writer = await asyncio.open_connection("127.0.0.1", self._bench.port)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
            if not stays:
                return await self._leave(reader, self._random.uniform(0, 1.5))
            answer = await reader.read()
        finally:
            writer.close()
        self.report.num_bytes += len(answer)
        status = answer[9:12].decode()
        if status != "200":
            return f"status {status}"
        return "finished" if b"data: [DONE]\n\n" in answer[-40:] else "cut off"

    async def _leave(self, reader: asyncio.StreamReader, after_s: float) -> str:
        """Read for a while, if at all, and go."""
        try:
            async with asyncio.timeout(after_s):
                answer = await reader.read()
        except TimeoutError:
            return "left"
        return "left" if answer.startswith(b"HTTP/1.1 200") else f"status {answer[9:12].decode()}"


def soak(command: list[str], num_streams: int, seconds: float, text: str, seed: int) -> Report:
    """A fresh gateway under load, and what was left of it."""
    with Bench("ours", command, text) as bench:
        bench.pace(max(0.01, num_streams * 100e-6), 1)
        before = _left_over(bench)
        test = Soak(bench, text, seed)
        asyncio.run(test.run(num_streams, seconds))
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            after = _left_over(bench)
            test.report.left_over = {what: max(0, after[what] - before[what]) for what in after}
            if not any(test.report.left_over.values()):
                break
            time.sleep(0.2)
        return test.report


def _left_over(bench: Bench) -> dict[str, int]:
    """What a gateway without clients has none of, or no more than at its start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{bench.port}/get_loads", timeout=10) as answer:
        (worker,) = json.load(answer)["workers"]
    tree = bench.processes.tree()
    return {
        "requests at the gateway": worker["load"],
        "requests at the engine": sum(rank["running"] for rank in worker["ranks"]),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in tree),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    text = (Path(__file__).resolve().parents[2] / "tests/perplexity/conversation.txt").read_text(encoding="utf-8")
    report = soak(ours(), arguments.streams, arguments.seconds, text, arguments.seed)
    print(json.dumps({"ends": report.ends, "megabytes": report.num_bytes // 10**6, "peak_mb": round(report.peak_mb)}))
    print(f"memory: {report.early_mb:.0f} MB in the first third, {report.late_mb:.0f} MB at the end")
    if report.faults:
        sys.exit("; ".join(report.faults))


if __name__ == "__main__":
    main()
