# SPDX-License-Identifier: MIT
"""`ts merge-traces FILES... -o OUT`: the Chrome traces of several ranks as one, on one clock.

Processes get numbers and names of their own per file; flows and asynchronous spans, which are joined by an id, stay
within their file. Files and OUT may end in .gz.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenspeed.config.flags import FlagError

_USAGE = """\
usage: ts merge-traces FILES... -o OUT

Puts Chrome traces (of start_profile, one a rank) into one, each rank with processes of its own.
"""
_OUT = ("-o", "--output")


def main(argv: Sequence[str]) -> int:
    """Exit status. Raises FlagError for a wrong command line, or a file that is no trace."""
    if {"--help", "-h"} & set(argv):
        print(_USAGE, end="")
        return 0
    paths, out = _words(argv)
    write_trace(out, merged([(Path(path).name, read_trace(path)) for path in paths]))
    return 0


def merged(traces: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """One trace of several with their names. Everything but the events is the first one's."""
    numbers: dict[tuple[int, Any], int] = {}
    base_ns = traces[0][1].get("baseTimeNanoseconds", 0)
    events: list[dict[str, Any]] = []
    for place, (name, trace) in enumerate(traces):
        shift_us = (trace.get("baseTimeNanoseconds", 0) - base_ns) / 1000
        for event in trace["traceEvents"]:
            pid = numbers.setdefault((place, event.get("pid")), len(numbers) + 1)
            events.append(_moved(event, place, pid, shift_us))
        events += _names(name, place, trace["traceEvents"], numbers)
    return {**traces[0][1], "traceEvents": events}


def _moved(event: dict[str, Any], place: int, pid: int, shift_us: float) -> dict[str, Any]:
    moved = {**event, "pid": pid}
    if "ts" in event:
        moved["ts"] = event["ts"] + shift_us
    if "id" in event:
        moved["id"] = f"{place}.{event['id']}"
    return moved


def _names(
    file: str, place: int, events: Sequence[dict[str, Any]], numbers: dict[tuple[int, Any], int]
) -> Iterator[dict[str, Any]]:
    """Names of the file's processes, with the file's before them; the last name of a process is the one shown."""
    names = {event.get("pid"): event["args"]["name"] for event in events if _names_process(event)}
    for (owner, pid), number in numbers.items():
        if owner == place:
            said = f"{file}: {names.get(pid, pid)}"
            yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "ts": 0, "args": {"name": said}}


def _names_process(event: dict[str, Any]) -> bool:
    return event.get("ph") == "M" and event.get("name") == "process_name" and "name" in event.get("args", {})


def read_trace(path: str) -> dict[str, Any]:
    """A trace as an object with `traceEvents`; a bare list of events is one too. Raises FlagError."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
            trace = json.load(file)
    except (OSError, ValueError, EOFError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FlagError(path, why) from None
    trace = {"traceEvents": trace} if isinstance(trace, list) else trace
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise FlagError(path, "not a Chrome trace: it has no list of traceEvents")
    return trace


def write_trace(path: str, trace: dict[str, Any]) -> None:
    """Raises FlagError where the file cannot be written."""
    try:
        with gzip.open(path, "wt", encoding="utf-8") if path.endswith(".gz") else open(path, "w") as file:
            json.dump(trace, file)
    except OSError as error:
        raise FlagError("-o", f"{path}: {error.strerror}") from None


def _words(argv: Sequence[str]) -> tuple[list[str], str]:
    words, paths, out = list(argv), list[str](), ""
    while words:
        word = words.pop(0)
        if word in _OUT:
            if not words:
                raise FlagError(word, "needs a value")
            out = words.pop(0)
        elif word.startswith("-"):
            raise FlagError(word, "no such flag of ts merge-traces")
        else:
            paths.append(word)
    if not paths:
        raise FlagError("FILES", "no trace is named")
    if not out:
        raise FlagError("-o", "is needed")
    return paths, out
