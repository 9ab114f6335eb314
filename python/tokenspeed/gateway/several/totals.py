# SPDX-License-Identifier: MIT
"""Metrics of several gateway processes as one text: a scrape reaches one of them and shows all.

What a process counts is added up. What it says of a worker or an engine, each process says alike: the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_PER_PROCESS = frozenset(
    {
        "smg_admission_inflight",
        "smg_admission_queue_depth",
        "smg_cache_placement_entries",
        "smg_cache_tree_tokens",
        "smg_engine_gen_throughput",
        "smg_http_connections_active",
        "smg_scheduler_inflight",
        "smg_scheduler_queue_depth",
        "smg_scheduler_queue_size_limit",
        "smg_worker_requests_active",
    }
)
"""Gauges of which every process has its own part."""


class _Fixed(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def added_up(texts: Iterable[bytes]) -> bytes:
    """One text of /metrics from one text a process."""
    merged: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            if family.name.endswith("_created"):
                continue  # when a series began differs by process and says nothing of all
            merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            seen = values.setdefault(family.name, {})
            adds = family.type in ("counter", "histogram", "summary") or family.name in _PER_PROCESS
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                before = seen.get(key)
                seen[key] = sample.value if before is None else _joined(before, sample.value, adds)
    for name, metric in merged.items():
        for (sample_name, labels), value in values[name].items():
            metric.add_sample(sample_name, dict(labels), value)
    registry = CollectorRegistry()
    registry.register(_Fixed(list(merged.values())))
    return generate_latest(registry)


def _joined(one: float, other: float, adds: bool) -> float:
    return one + other if adds else max(one, other)
