# SPDX-License-Identifier: MIT
"""One answer of what several replicas of an engine answer to the same call. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenspeed.observability.endpoint import Answer
from tokenspeed.observability.replica_metrics import merged_metrics


def merged(answers: Sequence[Answer]) -> Answer:
    """The first that is not a success; else lists and counts of all together, and the first's word for the rest.

    Metrics keep their replica's number as the label `dp_rank`.
    """
    for answer in answers:
        if answer.status != 200:
            return answer
    first = answers[0]
    if not first.content_type.startswith("application/json"):
        text = merged_metrics({rank: answer.data.decode() for rank, answer in enumerate(answers)})
        return Answer(200, first.content_type, text.encode())
    bodies = [json.loads(answer.data) for answer in answers]
    return Answer(200, first.content_type, json.dumps(_together(bodies)).encode())


def _together(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    whole = dict(bodies[0])
    for name, value in whole.items():
        if name.startswith("num_aborted") or isinstance(value, list):
            for other in bodies[1:]:
                whole[name] = whole[name] + other[name]
    return whole
