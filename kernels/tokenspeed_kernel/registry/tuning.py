# SPDX-License-Identifier: MIT
"""The tuning table: which solution was measured fastest for a call on a machine, kept on disk.

`ts kernels tune` writes it, selection reads it once per process and lets its word go before bands and priorities;
overrides go before the table. The file is JSON, {"version": 1, "machines": {machine: {call: solution}}}. A file that
cannot be read or holds something else is ignored, whole, with one warning that names it and says what to do; a single
entry that names a solution which does not fit is passed over. Never a wrong kernel: fitting is checked as always.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Hashable, Mapping
from pathlib import Path

import torch

TUNING_ENV = "TOKENSPEED_KERNEL_TUNING"
_VERSION = 1
_log = logging.getLogger(__name__)

Table = dict[str, dict[str, str]]


def tuning_path() -> Path:
    """The file: what the environment variable TOKENSPEED_KERNEL_TUNING names, else one in the user's cache."""
    if named := os.environ.get(TUNING_ENV):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "tokenspeed" / "kernels.json"


def call_key(op: str, device: str, dtype: torch.dtype, traits: Mapping[str, Hashable]) -> str:
    """A call as the table writes it: "gemm.linear device=cuda dtype=bfloat16 tokens=1 ..."."""
    named = {"device": device, "dtype": dtype, **traits}
    return " ".join([op, *(f"{name}={str(value).removeprefix('torch.')}" for name, value in named.items())])


def read_table(path: Path) -> Table:
    """The table in `path`; empty, with a warning, when the file is there but not a table."""
    try:
        content = json.loads(path.read_text())
        machines = content["machines"] if content["version"] == _VERSION else None
        if not isinstance(machines, dict) or not all(_is_calls(calls) for calls in machines.values()):
            raise ValueError("not a tuning table of this version")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning(
            "kernel tuning table %s is ignored: %s; delete it or write it anew with `ts kernels tune`", path, error
        )
        return {}
    return machines


def write_table(path: Path, table: Table) -> None:
    """Replace the file, at once and whole; OSError when that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps({"version": _VERSION, "machines": table}, indent=1, sort_keys=True) + "\n")
    unfinished.replace(path)


def _is_calls(calls: object) -> bool:
    return isinstance(calls, dict) and all(isinstance(name, str) for name in calls.values())
