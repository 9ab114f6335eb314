# SPDX-License-Identifier: MIT
"""Every name that the released gateway 1.13 exports is exported here with its labels, or the table says why not."""

from __future__ import annotations

import csv
from pathlib import Path

from prometheus_client.metrics import Histogram, MetricWrapperBase

from tokenspeed.observability.gateway_metrics import (
    DURATION_BUCKETS_S,
    FIRST_TOKEN_BUCKETS_S,
    TOKEN_BUCKETS_S,
    GatewayMetrics,
)
from tokenspeed.observability.histograms import Histograms
from tokenspeed.observability.worker_metrics import BACKOFF_BUCKETS_S

TABLE = Path(__file__).with_name("testdata") / "smg_metrics.tsv"
OWN = {"smg_bucket_policy_branch_total"}
"""Of policies that the released gateway has for prefill alone."""


def rows() -> dict[str, tuple[str, str, str]]:
    """Name to (type, labels, why it is not emitted)."""
    with TABLE.open(encoding="utf-8") as lines:
        table = [["" if cell == "-" else cell for cell in row] for row in csv.reader(lines, delimiter="\t")][1:]
    assert len({row[0] for row in table}) == len(table)
    return {name: (kind, labels, why) for name, kind, labels, why in table}


def exported() -> dict[str, tuple[str, str, tuple[float, ...]]]:
    """Name as a scraper sees it to (type, labels, upper bounds) of every collector of a gateway."""
    found: dict[str, tuple[str, str, tuple[float, ...]]] = {}
    for collector in GatewayMetrics().registry._collector_to_names:
        if isinstance(collector, Histograms):
            found[collector._name] = ("histogram", " ".join(collector._labels), collector._bounds)
        elif isinstance(collector, Histogram):
            found[collector._name] = ("histogram", " ".join(collector._labelnames), tuple(collector._upper_bounds[:-1]))
        elif isinstance(collector, MetricWrapperBase):
            name = collector._name + ("_total" if collector._type == "counter" else "")
            found[name] = (str(collector._type), " ".join(collector._labelnames), ())
    return found


def test_what_is_exported_is_what_the_table_says() -> None:
    told = {name: (kind, labels) for name, (kind, labels, why) in rows().items() if not why}
    found = {name: row[:2] for name, row in exported().items() if name.startswith("smg_") and name not in OWN}
    assert found == told
    assert len(told) >= 75


def test_a_name_that_is_not_exported_has_a_reason() -> None:
    for name, (kind, labels, why) in rows().items():
        assert bool(kind) != bool(why), name
        assert not (why and labels), name


def test_histograms_have_the_buckets_that_dashboards_know() -> None:
    bounds = {name: row[2] for name, row in exported().items()}
    slow = ("request_duration", "generation_duration", "ttft", "tpot")
    assert {bounds[f"smg_router_{name}_seconds"] for name in slow} == {DURATION_BUCKETS_S}
    assert bounds["smg_http_request_duration_seconds"] == DURATION_BUCKETS_S
    assert bounds["smg_router_time_to_first_token_seconds"] == FIRST_TOKEN_BUCKETS_S
    assert bounds["smg_router_request_time_per_output_token_seconds"] == TOKEN_BUCKETS_S
    assert bounds["smg_worker_retry_backoff_seconds"] == BACKOFF_BUCKETS_S
    assert bounds["smg_cache_aware_match_ratio"] == tuple(step / 10 for step in range(11))
