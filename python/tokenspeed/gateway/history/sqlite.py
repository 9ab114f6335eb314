# SPDX-License-Identifier: MIT
"""Records in one SQLite file, or in memory. Several gateway processes may share the file.

Used by `History` from one thread at a time. Records older than the retention are removed when the file is opened and
now and then while it is written.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from tokenspeed.gateway.history.store import BackendError, Key

T = TypeVar("T")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL, owner TEXT NOT NULL, id TEXT NOT NULL, written_s REAL NOT NULL, body BLOB NOT NULL,
    UNIQUE (kind, owner, id)
);
CREATE INDEX IF NOT EXISTS records_by_age ON records (written_s);
"""
_PUT = """
INSERT INTO records (kind, owner, id, written_s, body) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (kind, owner, id) DO UPDATE SET body = excluded.body, written_s = excluded.written_s
"""
_TRIM = """
WITH found AS (SELECT number FROM records WHERE kind >= ?1 AND kind < ?2 ORDER BY number DESC LIMIT -1 OFFSET ?3)
DELETE FROM records WHERE number IN (SELECT number FROM found)
"""
_WRITES_BETWEEN_PURGES = 1000
_BUSY_S = 5.0


class SqliteBackend:
    """`path` None keeps records in memory. `limits`: beginnings of kinds -> records kept of them, the oldest go first.
    `now_s`: seconds since the epoch."""

    def __init__(
        self,
        path: Path | None,
        retention_s: float,
        limits: Mapping[str, int] | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._retention_s = retention_s
        self._now_s = now_s
        self._num_writes = 0
        self._limits = dict(limits or {})
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            # Readers and one writer at once; a crash of the machine may cost the last records, never the file.
            self._connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
            self._purge()
        except (sqlite3.Error, OSError) as error:
            raise BackendError(f"{path}: {error}") from None

    def put(self, key: Key, body: bytes) -> None:
        """Write a record, over an old one of the same key."""
        self._call(lambda: self._connection.execute(_PUT, (*key, self._now_s(), body)))
        self._num_writes += 1
        if self._num_writes % _WRITES_BETWEEN_PURGES == 0:
            self._call(self._purge)
        for kinds, limit in self._limits.items():
            # Counting costs as much as there is to count, so that large limits are looked at now and then.
            if key[0].startswith(kinds) and self._num_writes % max(1, min(limit // 100, 100)) == 0:
                self._call(partial(self._connection.execute, _TRIM, (kinds, kinds + "\U0010ffff", limit)))

    def get(self, key: Key) -> bytes | None:
        """The record, if it is there."""
        query = "SELECT body FROM records WHERE kind = ? AND owner = ? AND id = ?"
        row = self._call(lambda: self._connection.execute(query, key).fetchone())
        return None if row is None else bytes(row[0])

    def delete(self, key: Key) -> bool:
        """Whether there was one."""
        query = "DELETE FROM records WHERE kind = ? AND owner = ? AND id = ?"
        return self._call(lambda: self._connection.execute(query, key)).rowcount > 0

    def list(self, kind: str, owner: str) -> list[tuple[str, bytes]]:
        """(id, record) of a kind, oldest first."""
        query = "SELECT id, body FROM records WHERE kind = ? AND owner = ? ORDER BY number"
        rows = self._call(lambda: self._connection.execute(query, (kind, owner)).fetchall())
        return [(str(record_id), bytes(body)) for record_id, body in rows]

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _purge(self) -> None:
        self._connection.execute("DELETE FROM records WHERE written_s < ?", (self._now_s() - self._retention_s,))

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except sqlite3.Error as error:
            raise BackendError(str(error)) from None
