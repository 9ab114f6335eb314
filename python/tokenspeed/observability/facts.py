# SPDX-License-Identifier: MIT
"""For tests alone: the engine's metrics as dashboards know them, to hold what an engine serves at /metrics against.

`testdata/engine_metrics.tsv` was written from what operators are told: every name, its type, the label that it has
besides model_name and app_key, and whether two ended requests, the second with a cached prefix, move it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "tokenspeed:"
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def settled_scrape(scrape: Callable[[], str]) -> str:
    """A scrape while no request holds a block: the step behind the last end has settled. Waits for that."""
    deadline = time.monotonic() + 20
    while _sum(_families(text := scrape())[PREFIX + "kv_cache_usage_perc"]):
        assert time.monotonic() < deadline, "requests hold blocks"
        time.sleep(0.02)
    return text


def known_metrics() -> list[list[str]]:
    """[name, type, own label, its values, whether two requests move it] of each; "-" for none."""
    path = Path(__file__).parent / "testdata" / "engine_metrics.tsv"
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def differences(before: str, after: str) -> list[str]:
    """What of two scrapes, before and after two requests while nothing runs, is not as known; empty when all is."""
    old, new = _families(before), _families(after)
    found = []
    for name, kind, label, values, moves in known_metrics():
        family = new.get(PREFIX + name)
        if family is None or family.type != kind:
            found.append(f"{name}: {'absent' if family is None else f'a {family.type}, not a {kind}'}")
            continue
        found += _wrong_samples(name, family, kind, label, values.split())
        change = _sum(family) - _sum(old[PREFIX + name])
        if (moves == "yes") != (change > 0) or (moves == "back" and _sum(family)):
            found.append(f"{name}: moved by {change}, expected: {moves}")
    return found


def _families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def _wrong_samples(name: str, family: Metric, kind: str, label: str, values: list[str]) -> list[str]:
    own = set() if label == "-" else {label}
    wrong = []
    for sample in family.samples:
        if sample.name not in [PREFIX + name + suffix for suffix in _SUFFIXES[kind]]:
            wrong.append(f"{name}: a sample {sample.name}")
        if sample.labels.keys() - {"le"} != {"model_name", "app_key"} | own:
            wrong.append(f"{name}: labels {sorted(sample.labels)}")
    if own and not {sample.labels[label] for sample in family.samples} >= set(values):
        wrong.append(f"{name}: {label} is not any of {values}")
    return wrong


def _sum(family: Metric) -> float:
    """Of counters and gauges the value, of histograms how much was observed."""
    return sum(sample.value for sample in family.samples if not sample.name.endswith(("_bucket", "_sum")))
