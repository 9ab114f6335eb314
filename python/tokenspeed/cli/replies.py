# SPDX-License-Identifier: MIT
"""One answer of what several replicas of an engine answer to the same call. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenspeed.observability.endpoint import Answer


def merged(answers: Sequence[Answer]) -> Answer:
    """The first that is not a success; else lists and counts of all together, and the first's word for the rest.

    Metrics keep their replica's number as the label `dp_rank`.
    """
    for answer in answers:
        if answer.status != 200:
            return answer
    first = answers[0]
    if not first.content_type.startswith("application/json"):
        return Answer(200, first.content_type, _metrics([answer.data.decode() for answer in answers]).encode())
    bodies = [json.loads(answer.data) for answer in answers]
    return Answer(200, first.content_type, json.dumps(_together(bodies)).encode())


def _together(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    whole = dict(bodies[0])
    for name, value in whole.items():
        if name.startswith("num_aborted") or isinstance(value, list):
            for other in bodies[1:]:
                whole[name] = whole[name] + other[name]
    return whole


def _metrics(texts: list[str]) -> str:
    """Prometheus' text format: each family's comments once, its samples replica by replica."""
    families: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
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
