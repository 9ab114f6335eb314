# SPDX-License-Identifier: MIT
"""A whole server as its operators see it, over the control port."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import Server


def engine_metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.control_port}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    return sum(s.value for family in families for s in family.samples if s.name == f"tokenspeed:{name}")


def test_the_engines_metrics_are_on_the_control_port(server: Server) -> None:
    before = engine_metric(server, "generation_tokens_total")
    body = {"prompt": "Count: one two", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    assert server.post("/v1/completions", body)[0] == 200
    assert engine_metric(server, "generation_tokens_total") == before + 5
    assert engine_metric(server, "num_requests_running") == 0
