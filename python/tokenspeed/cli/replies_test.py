# SPDX-License-Identifier: MIT
"""What several replicas answer becomes one answer that says as much."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.cli.replies import merged
from tokenspeed.observability.endpoint import Answer, json_answer

METRICS = """# HELP a_total Something.
# TYPE a_total counter
a_total{model="m"} %d
# HELP depth Something else.
# TYPE depth gauge
depth %d
"""


def body(*answers: dict[str, Any]) -> dict[str, Any]:
    answer = merged([json_answer(200, entry) for entry in answers])
    assert answer.status == 200
    whole: dict[str, Any] = json.loads(answer.data)
    return whole


def test_lists_are_joined_counts_are_added_and_the_first_speaks_for_all() -> None:
    assert body({"loads": [{"dp_rank": 0}]}, {"loads": [{"dp_rank": 1}]}) == {"loads": [{"dp_rank": 0}, {"dp_rank": 1}]}
    done = {"success": True, "message": "1 aborted", "num_aborted": 1}
    assert body(done, {**done, "num_aborted": 2})["num_aborted"] == 3


def test_one_that_refuses_refuses_for_all() -> None:
    answers = [json_answer(200, {"success": True}), json_answer(409, {"success": False})]
    assert merged(answers).status == 409


def test_metrics_of_all_are_told_apart_by_rank() -> None:
    texts = [METRICS % (1, 5), METRICS % (2, 6)]
    answer = merged([Answer(200, "text/plain; version=0.0.4", text.encode()) for text in texts])
    families = list(text_string_to_metric_families(answer.data.decode()))
    assert [family.name for family in families] == ["a", "depth"]
    samples = {(sample.name, sample.labels["dp_rank"]): sample.value for f in families for sample in f.samples}
    expected = {("a_total", "0"): 1, ("a_total", "1"): 2, ("depth", "0"): 5, ("depth", "1"): 6}
    assert samples == expected
