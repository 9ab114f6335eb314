# SPDX-License-Identifier: MIT
"""Metrics of the gateway's priority scheduler, by the released gateway's names. There is one tenant here, "default"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TENANT = "default"
_WAITS_S = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0)


class ClassState(NamedTuple):
    """A class now: requests that have a place and that wait, and the bounds of both."""

    num_admitted: int
    num_waiting: int
    queue_size: int
    num_places: int
    """That it has or could have."""


class SchedulerMetrics:
    """Told by the scheduler; all stay at nothing where there is none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"smg_scheduler_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"smg_scheduler_{name}", text, labels, registry=registry)

        self.admissions = counter("admit", "Requests by what became of their wait.", "class", "outcome")
        self.wait_s = Histogram(
            "smg_scheduler_queue_wait_seconds", "Waits.", ("class",), registry=registry, buckets=_WAITS_S
        )
        self.preemptions = counter("preemption", "Requests ended for others.", "victim_class", "by_class")
        self.clamped = counter("clamp", "Classes lowered.", "tenant", "requested_class", "effective_class")
        self.unknown = counter("unknown_priority_value", "Classes that are none.", "tenant")
        self.promotions = counter("starvation_promotion", "Requests that had waited too long.", "class")
        self._inflight = gauge("inflight", "Requests that have a place.", "class")
        self._depth = gauge("queue_depth", "Requests that wait for a place.", "class")
        self._size = gauge("queue_size_limit", "Requests that may wait.", "class")
        self._pressure = gauge("class_capacity_pressure", "The fuller of queue and places, 0 to 1.", "class")
        self._utilization = gauge("utilization", "Share of all places that are taken.")

    def show(self, classes: Mapping[str, ClassState], utilization: float) -> None:
        """How things stand."""
        self._utilization.set(utilization)
        for name, state in classes.items():
            self._inflight.labels(name).set(state.num_admitted)
            self._depth.labels(name).set(state.num_waiting)
            self._size.labels(name).set(state.queue_size)
            queue = state.num_waiting / max(1, state.queue_size)
            self._pressure.labels(name).set(min(1.0, max(queue, state.num_admitted / max(1, state.num_places))))
