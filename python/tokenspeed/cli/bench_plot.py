# SPDX-License-Identifier: MIT
"""The picture of a run of `ts bench serve`: what the server gave over time, and how its latencies are distributed.

matplotlib draws it and is loaded here alone; whoever does not ask for a plot does not need it. The series are pure.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.cli.bench_report import METRICS, latencies, percentile
from tokenspeed.cli.bench_requests import Outcome

_PANES = ("ttft", "itl", "e2el")
_MARKS = {50.0: "--", 99.0: ":"}
_BLUE, _ORANGE, _GREY = "#1f6fb2", "#d9822b", "#888888"
_MOST_BINS = 80


def can_plot() -> bool:
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    return True


def bin_width_s(duration_s: float) -> float:
    """A round number of seconds that cuts the run into at most 80 parts."""
    least = max(duration_s, 1e-3) / _MOST_BINS
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def throughput(outcomes: Sequence[Outcome], begin_s: float, width_s: float, count: int) -> list[float]:
    """Output tokens per second in each of `count` bins; an answer's tokens lie evenly on its chunks."""
    tokens = [0.0] * count
    for outcome in outcomes:
        share = outcome.output_tokens / len(outcome.token_times)
        for at_s in outcome.token_times:
            tokens[min(count - 1, int((outcome.begin_s - begin_s + at_s) / width_s))] += share
    return [number / width_s for number in tokens]


def open_requests(outcomes: Sequence[Outcome], begin_s: float) -> tuple[list[float], list[int]]:
    """Seconds at which the number of requests sent and not answered changes, and the number from there on."""
    edges = sorted((at_s, step) for o in outcomes for at_s, step in ((o.begin_s, 1), (o.end_s, -1)))
    times, numbers, number = [0.0], [0], 0
    for at_s, step in edges:
        number += step
        times.append(at_s - begin_s)
        numbers.append(number)
    return times, numbers


def plot(outcomes: Sequence[Outcome], summary: Mapping[str, Any], path: str) -> None:
    """Write a PNG. Needs matplotlib (`can_plot`)."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(12, 7.5), dpi=110, layout="constrained")
    panes = figure.subplot_mosaic([["time"] * 3, list(_PANES)], height_ratios=[1.1, 1])
    figure.suptitle(_title(summary), fontsize=11)
    answered = [outcome for outcome in outcomes if not outcome.error]
    _draw_time(panes["time"], outcomes, answered)
    measured = latencies(answered)
    for name in _PANES:
        _draw_shares(panes[name], name, measured[name])
    figure.savefig(path, format="png")


def _title(summary: Mapping[str, Any]) -> str:
    failed = f", {summary['failed']} failed" if summary["failed"] else ""
    return (
        f"{summary['model']}: {summary['completed']} requests in {summary['duration']:.1f} s{failed} · "
        f"{summary['request_throughput']:.2f} requests/s · {summary['output_throughput']:.1f} output tokens/s"
    )


def _draw_time(pane: Any, outcomes: Sequence[Outcome], answered: Sequence[Outcome]) -> None:
    begin_s = min(outcome.begin_s for outcome in outcomes)
    duration_s = max(outcome.end_s for outcome in outcomes) - begin_s
    width_s = bin_width_s(duration_s)
    count = max(1, math.ceil(duration_s / width_s))
    rates = throughput(answered, begin_s, width_s, count)
    edges = [width_s * place for place in range(count + 1)]
    pane.stairs(rates, edges, fill=True, color=_BLUE, alpha=0.35)
    pane.stairs(rates, edges, color=_BLUE)
    pane.set_xlim(0, edges[-1])
    pane.set_ylim(bottom=0)
    pane.set_xlabel("seconds")
    pane.set_ylabel(f"output tokens/s (per {width_s:g} s)", color=_BLUE)
    pane.grid(alpha=0.3)
    pane.set_title("throughput and open requests over time", fontsize=10)
    other = pane.twinx()
    times, numbers = open_requests(outcomes, begin_s)
    other.step(times, numbers, where="post", color=_ORANGE, linewidth=1.2)
    other.set_ylim(0, max(numbers) * 1.08)
    other.set_ylabel("open requests", color=_ORANGE)


def _draw_shares(pane: Any, name: str, values_ms: Sequence[float]) -> None:
    """Which share stays within a time; the time on a logarithmic axis where the values span more than a decade."""
    pane.set_title(f"{name}: {METRICS[name]}", fontsize=10)
    pane.set_xlabel("ms")
    pane.set_ylabel("share at most so long")
    pane.set_ylim(0, 1.02)
    pane.grid(alpha=0.3, which="both")
    if not values_ms:
        pane.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=pane.transAxes, color=_GREY)
        return
    ordered = sorted(values_ms)
    pane.step([ordered[0], *ordered], [n / len(ordered) for n in range(len(ordered) + 1)], where="post", color=_BLUE)
    if ordered[0] > 0 and ordered[-1] > 10 * ordered[0]:
        _logarithmic(pane.xaxis, ordered[-1] / ordered[0])
    for percent, style in _MARKS.items():
        at_ms = percentile(ordered, percent)
        label = f"p{percent:g}: {_figure(at_ms)} ms"
        pane.axvline(at_ms, color=_ORANGE, linestyle=style, linewidth=1.2, label=label)
    pane.legend(loc="lower right", fontsize=9)


def _logarithmic(axis: Any, span: float) -> None:
    """A logarithmic axis with plain figures, as many as fit."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.axes.set_xscale("log")
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if span < 100 else (1,)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
