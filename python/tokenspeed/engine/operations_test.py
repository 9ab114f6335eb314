# SPDX-License-Identifier: MIT
"""A running engine as its operators see it: scraped metrics and finish lines."""

from __future__ import annotations

import logging
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.config.flags import FlagError
from tokenspeed.engine.offline import Engine
from tokenspeed.observability.facts import differences, settled_scrape

StartEngine = Callable[..., Engine]

PROMPT = [(7 * step) % 300 + 3 for step in range(40)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def text_of(engine: Engine) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.ports.metrics_port}/metrics", timeout=10) as response:
        return str(response.read().decode())


def scrape(engine: Engine) -> dict[str, float]:
    """Name, and the value of the label that only some series have, to value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.ports.metrics_port}/metrics", timeout=10) as response:
        assert response.headers["content-type"].startswith("text/plain")
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    assert all(sample.labels["model_name"] == "tiny" and sample.labels["app_key"] == "a" for sample in samples)
    own = [[v for label, v in sample.labels.items() if label not in ("model_name", "app_key")] for sample in samples]
    return {" ".join([s.name.removeprefix("tokenspeed:"), *o]): s.value for s, o in zip(samples, own)}


def start(start_engine: StartEngine, **options: object) -> Engine:
    return start_engine(metrics_port=0, served_model_name="tiny", app_key="a", **options)


@pytest.mark.parametrize("depth", [0, 1])
def test_two_requests_show_in_every_metric_and_warming_up_in_none(start_engine: StartEngine, depth: int) -> None:
    engine = start(start_engine, overlap_depth=depth)
    before = scrape(engine)
    assert before["num_requests_total"] == before["iteration_tokens_total_count"] == 0
    assert before["func_latency_seconds_count plan"] == before["prompt_tokens_by_source_total computed"] == 0
    engine.generate([PROMPT], GREEDY)
    engine.generate([PROMPT], GREEDY)
    deadline = time.monotonic() + 10
    while (seen := scrape(engine))["kv_blocks active"]:  # until the step behind the last end has settled
        assert time.monotonic() < deadline
    assert (seen["num_requests_total"], seen["request_success_total"]) == (2, 2)
    assert (seen["prompt_tokens_total"], seen["generation_tokens_total"]) == (80, 16)
    hits = seen["prefix_cache_hits_total"]
    assert 32 <= hits < 40
    assert seen["prompt_tokens_by_source_total device_hit"] == hits
    assert seen["prompt_tokens_by_source_total computed"] == 80 - hits
    assert seen["prompt_tokens_by_source_total host_hit"] == seen["prompt_tokens_by_source_total store_hit"] == 0
    assert seen["time_to_first_token_seconds_count"] == seen["e2e_request_latency_seconds_count"] == 2
    assert seen["inter_token_latency_seconds_count"] == 14
    num_steps = seen["iteration_tokens_total_count"]
    assert num_steps >= 16
    for part in ("plan", "launch", "device", "settle"):
        assert seen[f"func_latency_seconds_count {part}"] == num_steps, part
        assert seen[f"func_latency_seconds_sum {part}"] > 0
    assert seen["kv_blocks cached"] >= 2
    assert seen["kv_blocks cached"] + seen["kv_blocks free"] == engine.load().total_blocks
    assert (seen["num_requests_running"], seen["num_requests_waiting"], seen["queue_age_seconds"]) == (0, 0, 0)
    assert seen["jit_serving_compiles_total"] == 0


def test_names_types_and_labels_are_those_that_dashboards_know(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    before = settled_scrape(lambda: text_of(engine))
    for _ in range(2):
        engine.generate([PROMPT], GREEDY)
    assert differences(before, settled_scrape(lambda: text_of(engine))) == []


def test_an_engine_without_the_flag_does_not_listen(start_engine: StartEngine) -> None:
    assert start_engine().ports.metrics_port is None
    assert start_engine(enable_metrics=True).ports.metrics_port is not None


def test_the_port_is_free_again_after_shutdown_and_a_taken_one_is_refused_by_name(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    port = engine.ports.metrics_port
    assert port is not None
    with pytest.raises(FlagError, match="--metrics-port"):
        start_engine(metrics_port=port)
    engine.shutdown()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize("depth", [0, 1])
def test_the_average_of_accepted_tokens_is_one_without_drafts(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    engine = start_engine(overlap_depth=depth, log_level="info")
    with caplog.at_level(logging.INFO, "tokenspeed.engine"):
        engine.generate([PROMPT], GREEDY)
        engine.shutdown()
    lines = re.findall(r"Finish! Accept_num_tokens_avg: (\S+)", caplog.text)
    assert lines == ["1.00"]
