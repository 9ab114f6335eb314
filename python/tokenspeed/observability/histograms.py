# SPDX-License-Identifier: MIT
"""Histograms that cost a request little: one search by halving and two additions, where the library's take locks and
walk the buckets. Observed on one thread; any may collect, and may then see a bucket before its sum. What a scrape reads
of them is what it reads of the library's.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """The observations under one set of label values."""

    __slots__ = ("_bounds", "begun_ts", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, not cumulative; the last has no upper bound."""
        self.total = 0.0
        self.begun_ts = time.time()
        self._bounds = bounds

    def observe(self, value: float) -> None:
        """Count `value` where it is at most the bucket's upper bound."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Histograms(Collector):
    """All series of one metric. `bounds` are the buckets' upper bounds, rising."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, bounds: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, tuple(bounds)
        self._les = [*map(floatToGoString, self._bounds), "+Inf"]
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def of(self, *values: str) -> Series:
        """The series of these label values."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Series(self._bounds)
        return series

    def describe(self) -> Iterable[Metric]:
        """The metric's name, for the registry."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        """All samples, for a scrape."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in list(self._series.items()):
            reached, buckets = 0, []
            for le, count in zip(self._les, series.counts):
                reached += count
                buckets.append((le, float(reached)))
            family.add_metric(values, buckets, series.total)
            family.add_sample(f"{self._name}_created", dict(zip(self._labels, values)), series.begun_ts)
        return [family]
