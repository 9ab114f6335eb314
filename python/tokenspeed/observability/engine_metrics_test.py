# SPDX-License-Identifier: MIT
"""The engine's metrics: all names of the reference, and numbers that mean what they say."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.observability.engine_metrics import EngineMetrics, FinishedSample, LoadSample
from tokenspeed.observability.facts import known_metrics

REFERENCE_NAMES = {row[0] for row in known_metrics()}
OURS = {
    "prompt_tokens_by_source",
    "kv_blocks",
    "kv_host_blocks",
    "kv_moved_bytes",
    "kv_transfer_failures",
    "queue_age_seconds",
}


def scrape(metrics: EngineMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {_key(s): s.value for family in families for s in family.samples if "le" not in s.labels}


def _key(sample: Any) -> str:
    """The name, and the value of the label that only some series have."""
    own = [value for label, value in sample.labels.items() if label not in ("model_name", "app_key")]
    return " ".join([sample.name, *own])


def test_every_name_of_the_reference_is_there_before_any_request() -> None:
    metrics = EngineMetrics("m", "app")
    names = {family.name.removeprefix("tokenspeed:") for family in metrics.registry.collect()}
    assert names == REFERENCE_NAMES | OURS


def test_every_sample_carries_model_and_app() -> None:
    metrics = EngineMetrics("m", "app")
    metrics.part_took("plan", 0.001)
    samples = [s for f in text_string_to_metric_families(metrics.render().decode()) for s in f.samples]
    assert samples
    assert all(s.labels["model_name"] == "m" and s.labels["app_key"] == "app" for s in samples)


def test_a_finished_request_is_counted_once_in_every_total() -> None:
    metrics = EngineMetrics("m")
    metrics.request_ended(FinishedSample(True, 100, 64, 5, 0.5, 2.5))
    seen = scrape(metrics)
    assert seen["tokenspeed:num_requests_total"] == 1
    assert seen["tokenspeed:request_success_total"] == 1
    assert seen["tokenspeed:prompt_tokens_total"] == 100
    assert seen["tokenspeed:prefix_cache_hits_total"] == 64
    assert seen["tokenspeed:generation_tokens_total"] == 5
    assert seen["tokenspeed:time_to_first_token_seconds_sum"] == pytest.approx(0.5)
    assert seen["tokenspeed:request_time_per_output_token_seconds_sum"] == pytest.approx(0.5)
    assert seen["tokenspeed:e2e_request_latency_seconds_sum"] == pytest.approx(2.5)


def test_an_aborted_request_without_tokens_is_no_success_and_has_no_token_latency() -> None:
    metrics = EngineMetrics("m")
    metrics.request_ended(FinishedSample(False, 100, 0, 0, None, 2.5))
    seen = scrape(metrics)
    assert seen["tokenspeed:num_requests_total"] == 1
    assert seen["tokenspeed:request_success_total"] == 0
    assert seen["tokenspeed:time_to_first_token_seconds_count"] == 0
    assert seen["tokenspeed:request_time_per_output_token_seconds_count"] == 0


def test_steps_set_the_gauges_and_idle_resets_them() -> None:
    metrics = EngineMetrics("m")
    metrics.step_settled(num_tokens=700)
    metrics.load_changed(LoadSample(3, 2, 10, 4, 6, time.time() - 5))
    metrics.token_gaps(np.array([0.01, 0.03]))
    seen = scrape(metrics)
    assert (seen["tokenspeed:num_requests_running"], seen["tokenspeed:num_requests_waiting"]) == (3, 2)
    assert seen["tokenspeed:kv_cache_usage_perc"] == 0.5
    assert [seen[f"tokenspeed:kv_blocks {state}"] for state in ("active", "cached", "free")] == [10, 4, 6]
    assert 5 <= seen["tokenspeed:queue_age_seconds"] < 60
    assert seen["tokenspeed:iteration_tokens_total_sum"] == 700
    assert seen["tokenspeed:inter_token_latency_seconds_sum"] == pytest.approx(0.04)
    metrics.load_changed(LoadSample(0, 0, 0, 14, 6, None))
    assert scrape(metrics)["tokenspeed:num_requests_running"] == 0
    assert scrape(metrics)["tokenspeed:queue_age_seconds"] == 0


def test_gaps_fall_into_their_buckets_a_bound_included() -> None:
    metrics = EngineMetrics("m")
    metrics.token_gaps(np.array([0.001, 0.0011, 5.0]))
    metrics.token_gaps(np.array([]))
    families = text_string_to_metric_families(metrics.render().decode())
    buckets = {
        s.labels["le"]: s.value
        for f in families
        for s in f.samples
        if s.name.endswith("inter_token_latency_seconds_bucket")
    }
    assert (buckets["0.001"], buckets["0.0025"], buckets["2.0"], buckets["+Inf"]) == (1, 2, 2, 3)


def test_prompt_tokens_and_step_time_are_split() -> None:
    metrics = EngineMetrics("m")
    metrics.prompt_tokens_from("computed", 30)
    metrics.prompt_tokens_from("device_hit", 12)
    metrics.part_took("device", 0.25)
    seen = scrape(metrics)
    found = [seen[f"tokenspeed:prompt_tokens_by_source_total {s}"] for s in ("computed", "device_hit", "host_hit")]
    assert found == [30, 12, 0]
    assert seen["tokenspeed:func_latency_seconds_sum device"] == 0.25
    assert seen["tokenspeed:func_latency_seconds_count plan"] == 0


def test_late_compiles_nan_and_drafts_are_counted() -> None:
    metrics = EngineMetrics("m")
    metrics.compiled_late(1.5)
    metrics.nan_aborted()
    metrics.drafts_verified(num_drafts=2, num_draft_tokens=8, num_accepted=5)
    seen = scrape(metrics)
    assert seen["tokenspeed:jit_serving_compiles_total"] == 1
    assert seen["tokenspeed:jit_serving_compile_seconds_total"] == 1.5
    assert seen["tokenspeed:num_nan_aborted_requests_total"] == 1
    assert seen["tokenspeed:spec_decode_num_drafts_total"] == 2
    assert seen["tokenspeed:spec_decode_num_draft_tokens_total"] == 8
    assert seen["tokenspeed:spec_decode_num_accepted_tokens_total"] == 5


def test_the_host_tier_is_counted_by_state_and_its_traffic_by_direction() -> None:
    metrics = EngineMetrics("m")
    metrics.host_blocks_changed(cached=5, copying=2, free=9)
    metrics.blocks_moved("to_host", 4096)
    metrics.blocks_moved("to_host", 1024)
    metrics.transfer_failed("to_device")
    seen = scrape(metrics)
    assert [seen[f"tokenspeed:kv_host_blocks {state}"] for state in ("cached", "copying", "free")] == [5, 2, 9]
    assert [seen[f"tokenspeed:kv_moved_bytes_total {way}"] for way in ("to_host", "to_device")] == [5120, 0]
    assert [seen[f"tokenspeed:kv_transfer_failures_total {way}"] for way in ("to_host", "to_device")] == [0, 1]
