# SPDX-License-Identifier: MIT
"""A scrape reads the same of our histograms and of the library's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tokenspeed.observability.histograms import Histograms

BOUNDS = (0.001, 0.5, 1, 2.5)
SEEN = {("a", "x"): (0.0, 0.001, 0.0011, 0.5, 2.5, 2.6, 100.0), ("b", "y"): (1.0,), ("c", 'with "quotes"'): ()}


def text_of(registry: CollectorRegistry) -> list[str]:
    """The lines of a scrape, but for when each series began."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created{" not in line]


def test_the_text_of_a_scrape_is_that_of_the_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histograms("t_seconds", "Some time.", ("one", "two"), ours, BOUNDS)
    library = Histogram("t_seconds", "Some time.", ("one", "two"), registry=theirs, buckets=BOUNDS)
    for labels, values in SEEN.items():
        mine.of(*labels)
        library.labels(*labels)
        for value in values:
            mine.of(*labels).observe(value)
            library.labels(*labels).observe(value)
    assert text_of(ours) == text_of(theirs)
    assert 't_seconds_created{one="a",two="x"}' in generate_latest(ours).decode()


def test_a_metric_without_series_shows_its_name_alone() -> None:
    ours = CollectorRegistry()
    Histograms("t_seconds", "Some time.", ("one",), ours, BOUNDS)
    assert text_of(ours) == ["# HELP t_seconds Some time.", "# TYPE t_seconds histogram"]
