# SPDX-License-Identifier: MIT
"""Records in Redis, for several gateways of several hosts. Used by `History` from one thread at a time.

A record is a string key that expires; the order of a kind is a sorted set of its ids by a counter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tokenspeed.gateway.history.store import BackendError, Key

T = TypeVar("T")
_PREFIX = "tokenspeed"


class RedisBackend:
    """`url`: redis://... or rediss://...; op_timeout_s bounds every call."""

    def __init__(self, url: str, retention_s: float, op_timeout_s: float, pool_size: int) -> None:
        import redis  # Only servers that name one need the client.

        self._error: type[Exception] = redis.RedisError
        self._retention_ms = int(retention_s * 1000)
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                socket_timeout=op_timeout_s,
                socket_connect_timeout=op_timeout_s,
                max_connections=pool_size,
            )
            self._client.ping()
        except (redis.RedisError, ValueError) as error:
            raise BackendError(str(error)) from None

    def put(self, key: Key, body: bytes) -> None:
        """Write a record, over an old one of the same key."""
        kind, owner, record_id = key

        def write() -> None:
            number = self._client.incr(f"{_PREFIX}:counter")
            with self._client.pipeline() as batch:
                batch.set(_name(key), body, px=self._retention_ms)
                batch.zadd(_order(kind, owner), {record_id: number}, nx=True)
                batch.pexpire(_order(kind, owner), self._retention_ms)
                batch.execute()

        self._call(write)

    def get(self, key: Key) -> bytes | None:
        """The record, if it is there."""
        return self._call(lambda: self._client.get(_name(key)))

    def delete(self, key: Key) -> bool:
        """Whether there was one."""
        kind, owner, record_id = key
        self._call(lambda: self._client.zrem(_order(kind, owner), record_id))
        return bool(self._call(lambda: self._client.delete(_name(key))))

    def list(self, kind: str, owner: str) -> list[tuple[str, bytes]]:
        """(id, record) of a kind, oldest first."""
        ids = [raw.decode() for raw in self._call(lambda: self._client.zrange(_order(kind, owner), 0, -1))]
        if not ids:
            return []
        bodies = self._call(lambda: self._client.mget([_name((kind, owner, record_id)) for record_id in ids]))
        return [(record_id, body) for record_id, body in zip(ids, bodies) if body is not None]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._error as error:
            raise BackendError(str(error)) from None


def _name(key: Key) -> str:
    return ":".join((_PREFIX, *key))


def _order(kind: str, owner: str) -> str:
    return f"{_PREFIX}:order:{kind}:{owner}"
