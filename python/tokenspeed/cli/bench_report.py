# SPDX-License-Identifier: MIT
"""Outcomes of `ts bench serve` as numbers and a table. Pure.

The summary's names and their meaning are those that vLLM's `bench serve` made customary; times are in milliseconds.
Failed requests are counted and are in no latency and no throughput.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.cli.bench_requests import Outcome

METRICS = {"ttft": "time to first token", "tpot": "time per output token", "itl": "gap between chunks", "e2el": "whole"}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the neighbours, as numpy has it. `values`: at least one."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Milliseconds by metric, of outcomes without an error."""
    tpot = [outcome.tpot_s for outcome in outcomes]
    gaps = (late - early for outcome in outcomes for early, late in itertools.pairwise(outcome.token_times))
    return {
        "ttft": [1e3 * outcome.ttft_s for outcome in outcomes],
        "tpot": [1e3 * seconds for seconds in tpot if seconds is not None],
        "itl": [1e3 * seconds for seconds in gaps],
        "e2el": [1e3 * outcome.e2e_s for outcome in outcomes],
    }


def summarize(outcomes: Sequence[Outcome], percents: Sequence[float], goals: Mapping[str, float]) -> dict[str, Any]:
    """Counts, throughputs per second and latencies. goals: milliseconds by metric that a good request stays within."""
    answered = [outcome for outcome in outcomes if not outcome.error]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    begin_s, end_s = min(outcome.begin_s for outcome in outcomes), max(outcome.end_s for outcome in outcomes)
    duration_s = max(end_s - begin_s, 1e-9)
    num_input = sum(outcome.prompt_tokens for outcome in answered)
    num_output = sum(outcome.output_tokens for outcome in answered)
    summary: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(answered),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "without_usage": sum(not outcome.counted for outcome in answered),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(answered) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "request_goodput": sum(_is_good(outcome, goals) for outcome in answered) / duration_s if goals else None,
    }
    for name, values in latencies(answered).items():
        summary |= _statistics(name, values, percents)
    return summary


def _is_good(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    took = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.e2e_s}
    return all(1e3 * took[name] <= goal for name, goal in goals.items())


def _statistics(name: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float | None]:
    """Null where nothing was measured."""
    rows: dict[str, float | None] = {
        f"mean_{name}_ms": statistics.fmean(values) if values else None,
        f"median_{name}_ms": statistics.median(values) if values else None,
        f"std_{name}_ms": statistics.pstdev(values) if values else None,
    }
    return rows | {f"p{percent:g}_{name}_ms": percentile(values, percent) if values else None for percent in percents}


def table(summary: Mapping[str, Any], percents: Sequence[float]) -> str:
    """For people, a line a number and a row a latency."""
    counts = ["completed", "failed", "duration", "total_input_tokens", "total_output_tokens"]
    rates = ["request_throughput", "request_goodput", "output_throughput", "total_token_throughput"]
    lines = [f"{name.replace('_', ' '):<24}{_number(summary[name]):>12}" for name in counts + rates]
    columns = ["mean", "median", "std", *(f"p{percent:g}" for percent in percents)]
    lines += ["", f"{'ms':<28}" + "".join(f"{column:>11}" for column in columns)]
    for name, said in METRICS.items():
        cells = "".join(f"{_number(summary[f'{column}_{name}_ms']):>11}" for column in columns)
        lines.append(f"{name + ', ' + said:<28}{cells}")
    if summary["without_usage"]:
        lines.append(f"{summary['without_usage']} answers came without usage: their chunks are counted as tokens")
    if summary["failed"]:
        lines.append(f"{summary['failed']} failed, the first: {summary['first_error']}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
