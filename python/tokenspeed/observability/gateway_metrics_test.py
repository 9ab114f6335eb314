# SPDX-License-Identifier: MIT
"""The gateway's metrics, read back as a scraper reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.observability.gateway_metrics import GatewayMetrics, RequestTimes, RouteLabels
from tokenspeed.observability.worker_metrics import WorkerLoad

ROUTE = RouteLabels(model="m", endpoint="chat", connection_mode="zmq")


def scrape(metrics: GatewayMetrics) -> dict[tuple[str, ...], float]:
    """Every sample, keyed by its name and its label values sorted by label name."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, *(s.labels[key] for key in sorted(s.labels))): s.value for s in samples}


def test_an_http_request_counts_once_by_path_and_by_status() -> None:
    metrics = GatewayMetrics()
    metrics.http_finished("POST", "/v1/chat/completions", 404, "model_not_found", 0.25)
    seen = scrape(metrics)
    assert seen[("smg_http_requests_total", "POST", "/v1/chat/completions")] == 1
    # Labels in alphabetical order: error_code, path, status_code.
    assert seen[("smg_http_responses_total", "model_not_found", "/v1/chat/completions", "404")] == 1
    assert seen[("smg_http_request_duration_seconds_sum", "POST", "/v1/chat/completions")] == pytest.approx(0.25)


def test_time_per_output_token_leaves_the_first_token_out() -> None:
    metrics = GatewayMetrics()
    metrics.route_finished(ROUTE, RequestTimes(total_s=2.0, first_token_s=0.5, num_output_tokens=4))
    samples = scrape(metrics)
    sums = {key[0]: value for key, value in samples.items() if key[0].endswith("_sum")}
    assert sums["smg_router_ttft_seconds_sum"] == pytest.approx(0.5)
    assert sums["smg_router_generation_duration_seconds_sum"] == pytest.approx(1.5)
    assert sums["smg_router_tpot_seconds_sum"] == pytest.approx(0.5)
    assert sums["smg_router_request_duration_seconds_sum"] == pytest.approx(2.0)


def test_a_request_without_tokens_has_a_duration_and_nothing_else() -> None:
    metrics = GatewayMetrics()
    metrics.route_finished(ROUTE, RequestTimes(total_s=2.0, first_token_s=None, num_output_tokens=0))
    counted = {key[0] for key, value in scrape(metrics).items() if key[0].endswith("_count") and value == 1}
    assert counted == {"smg_router_request_duration_seconds_count"}


def test_tokens_are_counted_by_type() -> None:
    metrics = GatewayMetrics()
    metrics.tokens(ROUTE, num_input=10, num_cached=8, num_output=3)
    by_type = {
        sample.labels["token_type"]: sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == "smg_router_tokens_total"
    }
    assert by_type == {"input": 10, "cached": 8, "output": 3}


def test_load_of_a_rank_appears_under_both_names_and_goes_with_the_worker() -> None:
    metrics = GatewayMetrics()
    metrics.workers.health("w0", True)
    metrics.workers.load(
        "w0", "m", 1, WorkerLoad(num_running=2, num_waiting=3, num_active_blocks=25, num_total_blocks=100)
    )
    seen = scrape(metrics)
    assert seen[("tokenspeed:num_requests_running", "m", "w0@1")] == 2
    assert seen[("tokenspeed:num_requests_waiting", "m", "w0@1")] == 3
    assert seen[("tokenspeed:kv_cache_usage_perc", "m", "w0@1")] == 0.25
    assert seen[("smg_engine_running_requests", "1", "m", "w0")] == 2
    metrics.workers.rank_removed("w0", "m", 1)
    metrics.workers.removed("w0")
    assert not [key for key in scrape(metrics) if "w0" in key]


def test_removing_a_worker_that_never_reported_is_harmless() -> None:
    metrics = GatewayMetrics()
    metrics.workers.rank_removed("w0", "m", 1)
    metrics.workers.removed("w0")
    assert not [key for key in scrape(metrics) if "w0" in key]


def test_an_engine_without_blocks_has_no_usage() -> None:
    assert WorkerLoad(num_running=0, num_waiting=0, num_active_blocks=0, num_total_blocks=0).kv_usage == 0.0


def test_two_registries_do_not_share_numbers() -> None:
    first, second = GatewayMetrics(), GatewayMetrics()
    first.route_started(ROUTE, streaming=True)
    first.route_failed(ROUTE, "no_workers", "model_not_found")
    assert [value for key, value in scrape(first).items() if key[0] == "smg_router_requests_total"] == [1]
    assert [value for key, value in scrape(first).items() if key[0] == "smg_router_request_errors_total"] == [1]
    assert not [key for key in scrape(second) if key[0] == "smg_router_requests_total"]
