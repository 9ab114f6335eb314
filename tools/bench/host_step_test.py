# SPDX-License-Identifier: MIT
"""The benchmark of a step's host part runs the engine's own loop, and its parts are parts of the step."""

from __future__ import annotations

from tools.bench.host_step import HostBench


def test_every_part_of_a_step_is_timed_once_a_step_and_no_part_is_longer_than_all() -> None:
    bench = HostBench(rows=3, num_steps=8)
    numbers = bench.measure()
    assert set(numbers) == {"plan", "launch", "device", "settle", "publish", "step"}
    assert {part: len(seen) for part, seen in bench.desk.parts.by_part.items()} == dict.fromkeys(numbers, 8)
    assert all(value > 0 for value in numbers.values())
    load = bench.loop.load()
    assert load.num_running == 3, "the steps that were timed decode all rows"
