# SPDX-License-Identifier: MIT
"""What is kept of responses when its place fails, or when the process that ran them is gone."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.gateway.testing.fake_engine import Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

SLOW = "x" * 600


def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    if len(request.input_ids) > len(SLOW):
        for _ in range(2000):
            yield Step(ids("z"), delay_s=0.01)
    yield from replying(ids("Paris"), 10)(request)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite"


@pytest.fixture
def gateway(file: Path) -> Iterator[RunningGateway]:
    with RunningGateway([script], ["--history-path", str(file)]) as running:
        yield running


def rows(file: Path) -> list[tuple[str, dict[str, Any]]]:
    with sqlite3.connect(file) as connection:
        return [(str(i), json.loads(body)) for i, body in connection.execute("SELECT id, body FROM records")]


def test_what_only_exists_to_be_kept_is_503_where_it_cannot_be(gateway: RunningGateway, file: Path) -> None:
    conversation = gateway.post("/v1/conversations", {})[1]["id"]
    with sqlite3.connect(file) as connection:
        connection.execute("DROP TABLE records")
    item = {"role": "user", "content": "hi"}
    for path, body in (
        ("/v1/conversations", {"items": [item]}),
        (f"/v1/conversations/{conversation}", {"metadata": {"a": "b"}}),
        (f"/v1/conversations/{conversation}/items", {"items": [item]}),
        ("/v1/responses", {"input": "hi", "background": True}),
    ):
        status, answer = gateway.post(path, body)
        assert (status, answer["error"]["code"]) == (503, "history_unavailable"), path
    # An answer that is there is given; that it is not kept is in the log.
    assert gateway.post("/v1/responses", {"input": "hi"})[1]["status"] == "completed"


def test_a_response_of_a_process_that_is_gone_has_failed_and_one_that_runs_is_not_gone_on_with(
    gateway: RunningGateway, file: Path
) -> None:
    running = gateway.post("/v1/responses", {"input": SLOW, "background": True})[1]["id"]
    ((record_id, record),) = rows(file)
    assert record_id == running and record["runs_until_s"] > time.time() + 30
    with sqlite3.connect(file) as connection:
        for name, until_s in (("resp_gone", time.time() - 1), ("resp_elsewhere", time.time() + 60)):
            body = {**record, "runs_until_s": until_s}
            connection.execute(
                "INSERT INTO records (kind, owner, id, written_s, body) VALUES (?, ?, ?, ?, ?)",
                ("response", "", name, time.time(), json.dumps(body).encode()),
            )
    status, gone = gateway.get("/v1/responses/resp_gone")
    assert (status, gone["status"], gone["error"]["code"]) == (200, "failed", "server_error")
    assert gateway.get("/v1/responses/resp_elsewhere")[1]["status"] == "queued"
    assert gateway.get(f"/v1/responses/{running}")[1]["status"] in ("queued", "in_progress")
    status, answer = gateway.post("/v1/responses", {"input": "hi", "previous_response_id": running})
    assert (status, answer["error"]["code"]) == (400, "response_not_finished")
    assert gateway.post(f"/v1/responses/{running}/cancel", {})[1]["status"] == "cancelled"
