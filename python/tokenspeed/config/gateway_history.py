# SPDX-License-Identifier: MIT
"""The gateway's settings of what is stored: flags and what they come to. Reads a file only where a flag names one that
holds a secret."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.config.flags import Flag, FlagError
from tokenspeed.config.flags_rows import Rows

HISTORY_BACKENDS = ("sqlite", "memory", "redis", "none")


@dataclass(frozen=True)
class HistoryConfig:
    """Where stored responses and conversations are kept, and for how long. backend: sqlite (the file `path`), memory,
    redis (`redis_url`) or none (the APIs that need it are not there)."""

    backend: str
    path: str | None
    """None: `default_path`, or memory where that cannot be written."""
    default_path: str
    redis_url: str | None
    retention_s: float
    op_timeout_s: float
    pool_size: int
    """Connections to Redis at most."""
    memory_responses: int
    memory_items: int
    """What is kept in memory at most; the oldest goes first."""
    max_background: int
    """Background responses that run at once."""

    @property
    def has_file(self) -> bool:
        """Whether a SQLite file can be had where it is wanted: a container's home may not be writable."""
        if self.path is not None:
            return True
        folder = Path(self.default_path).parent
        while not folder.exists():
            folder = folder.parent
        return os.access(folder, os.W_OK)


_flag = Rows("History")

HISTORY_FLAGS: tuple[Flag, ...] = (
    _flag("--history-backend", "str", "sqlite", "where responses are kept", HISTORY_BACKENDS),
    _flag("--history-path", "str", None, "the SQLite file; default: in ~/.local/state/tokenspeed"),
    _flag("--history-memory-max-responses", "int", 10000, "responses kept in memory; the oldest go first"),
    _flag("--history-memory-max-items", "int", 100000, "items of conversations kept in memory"),
    _flag("--history-memory-retention-secs", "float", 86400.0, "records are kept in memory this long"),
    _flag("--redis-url", "str", None, "redis:// address for --history-backend redis"),
    _flag("--redis-url-file", "str", None, "file with that address, which may hold a password"),
    _flag("--redis-pool-max --redis-pool-max-size", "int", 16, "connections to Redis"),
    _flag("--redis-op-timeout-secs", "float", 5.0, "longest wait for Redis"),
    _flag("--redis-retention-days", "int", 30, "records are kept this long, in SQLite too"),
    _flag("--max-background-responses", "int", 1024, "background responses at once; more get 429"),
)

HISTORY_RANGES: tuple[tuple[str, float, float], ...] = (
    ("--redis-op-timeout-secs", 0.001, 1e6),
    ("--redis-retention-days", 1, 36500),
    ("--redis-pool-max", 1, 65536),
    ("--history-memory-max-responses", 1, 2**31),
    ("--history-memory-max-items", 1, 2**31),
    ("--history-memory-retention-secs", 1, 1e10),
    ("--max-background-responses", 0, 2**31),
)


def history_config(values: dict[str, Any]) -> HistoryConfig:
    """Raises `FlagError`."""
    backend = values["history_backend"]
    url = _redis_url(values)
    if backend == "redis" and not url:
        raise FlagError("--redis-url", "--history-backend redis needs the server's address")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    in_memory = backend == "memory"
    return HistoryConfig(
        backend=backend,
        path=values["history_path"],
        default_path=str(state / "tokenspeed" / "history.sqlite"),
        redis_url=url,
        retention_s=values["history_memory_retention_secs"] if in_memory else values["redis_retention_days"] * 86400.0,
        op_timeout_s=values["redis_op_timeout_secs"],
        pool_size=values["redis_pool_max"],
        memory_responses=values["history_memory_max_responses"],
        memory_items=values["history_memory_max_items"],
        max_background=values["max_background_responses"],
    )


def _redis_url(values: dict[str, Any]) -> str | None:
    file = values["redis_url_file"]
    if file is None:
        return values["redis_url"]
    if values["redis_url"] is not None:
        raise FlagError("--redis-url-file", "it excludes --redis-url")
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise FlagError("--redis-url-file", f"{file} cannot be read: {error.strerror}") from None
