# SPDX-License-Identifier: MIT
"""Metrics of several replicas of an engine as one text. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def merged_metrics(texts: Mapping[int, str]) -> str:
    """Prometheus' text format, by replica: each family's comments once, its samples replica by replica with the label
    `dp_rank`."""
    families: dict[str, list[str]] = {}
    for rank, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = families.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                families.setdefault(family, []).append(_labelled(line, rank))
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _labelled(sample: str, rank: int) -> str:
    label = f'dp_rank="{rank}"'
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
