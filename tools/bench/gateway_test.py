# SPDX-License-Identifier: MIT
"""The gateway's benchmark runs a whole gateway and a scripted engine, and its numbers are of what it asked for."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from tools.bench.gateway import Bench, Processes, ours
from tools.bench.gateway_load import Ask, BadAnswer, run
from tools.bench.gateway_soak import Report, soak

TEXT = "A gateway is measured by what a token costs. " * 20


def test_the_processor_time_is_that_of_the_process_and_grows_with_its_work() -> None:
    processes = Processes(os.getpid())
    before_us = processes.cpu_us()
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    assert processes.cpu_us() - before_us > 25_000
    assert processes.rss_mb() > 1


def test_a_round_tells_every_number_and_an_error_for_an_answer_ends_the_run() -> None:
    with Bench("ours", ours(), TEXT) as gateway:
        numbers = gateway.measure(2, 64)
        assert set(numbers) == {"us_per_token", "us_per_request", "us_per_stream", "rss_mb"}
        assert all(value > 0 for value in numbers.values())
        with pytest.raises(ExceptionGroup) as raised:
            asyncio.run(run(gateway.port, Ask("nobody's model", 5, 4, True), 1, 1, TEXT))
    assert isinstance(raised.value.exceptions[0], BadAnswer)


def test_a_program_that_is_no_gateway_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no gateway here"):
        Bench("none", [sys.executable, "-c", "print('no gateway here')"], TEXT).__enter__()


def test_a_gateway_under_clients_that_leave_keeps_nothing_of_them() -> None:
    report = soak(ours(), 64, 2.0, TEXT, 1)
    assert report.faults == []
    assert report.ends["finished"] > 20 and report.ends["left"] > 10


def test_the_load_test_names_what_a_gateway_leaves_behind() -> None:
    report = Report(early_mb=50.0, late_mb=90.0, left_over={"descriptors": 3, "requests at the engine": 0})
    report.ends.update({"finished": 5, "left": 2, "status 503": 1})
    assert report.faults == ["1 requests: status 503", "3 descriptors left over", "memory grew from 50 to 90 MB"]
