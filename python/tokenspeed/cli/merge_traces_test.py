# SPDX-License-Identifier: MIT
"""`ts merge-traces`: several ranks' Chrome traces as one, and files that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.cli import ts


def trace(base_ns: int, ts_us: float) -> dict[str, Any]:
    """Two processes that have the same numbers on every rank, and a flow."""
    return {
        "baseTimeNanoseconds": base_ns,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "step", "pid": 7, "tid": 1, "ts": ts_us, "dur": 5},
            {"ph": "X", "name": "span", "pid": "Spans", "tid": 1, "ts": ts_us, "dur": 5},
            {"ph": "s", "name": "flow", "pid": 7, "tid": 1, "ts": ts_us, "id": 3},
        ],
    }


def test_ranks_keep_processes_clocks_and_flows_apart(tmp_path: Path) -> None:
    first, second, out = tmp_path / "tp0.json", tmp_path / "tp1.json.gz", tmp_path / "all.json.gz"
    first.write_text(json.dumps(trace(1_000_000, 10.0)))
    second.write_bytes(gzip.compress(json.dumps(trace(3_000_000, 10.0)).encode()))
    assert ts.main(["merge-traces", str(first), str(second), "-o", str(out)]) == 0
    whole = json.loads(gzip.decompress(out.read_bytes()))
    steps = [event for event in whole["traceEvents"] if event["name"] == "step"]
    spans = [event for event in whole["traceEvents"] if event["name"] == "span"]
    assert len({event["pid"] for event in steps + spans}) == 4
    assert [event["ts"] for event in steps] == [10.0, 2010.0]
    assert len({event["id"] for event in whole["traceEvents"] if event["name"] == "flow"}) == 2
    names = {event["pid"]: event["args"]["name"] for event in whole["traceEvents"] if event["name"] == "process_name"}
    assert [names[event["pid"]] for event in steps] == ["tp0.json: python", "tp1.json.gz: python"]
    assert names[spans[1]["pid"]] == "tp1.json.gz: Spans" and whole["baseTimeNanoseconds"] == 1_000_000


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("{good}", "-o: is needed"),
        ("-o {out}", "FILES"),
        ("{good} -o", "-o: needs a value"),
        ("{good} --fast -o {out}", "--fast"),
        ("{good} {bad} -o {out}", "{bad}: not a Chrome trace"),
        ("{good} /no/such/trace -o {out}", "/no/such/trace"),
        ("{good} -o /no/such/folder/x", "-o: /no/such/folder/x"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, named: str
) -> None:
    paths = {name: str(tmp_path / name) for name in ("good", "bad", "out")}
    Path(paths["good"]).write_text(json.dumps(trace(0, 1.0)))
    Path(paths["bad"]).write_text('{"traceEvents": [3]}')
    assert ts.main(["merge-traces", *words.format(**paths).split()]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and named.format(**paths) in err and not Path(paths["out"]).exists()
