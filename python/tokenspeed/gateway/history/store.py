# SPDX-License-Identifier: MIT
"""Records that outlive a request, on the loop's side: reads see earlier writes, and no write holds up the loop.

A record is bytes under (kind, owner, id). Backends are plain and blocking (`sqlite.py`, `redis.py`) and run in worker
threads, one call at a time; what is being written is readable from here until it is there. A backend that fails is the
server's fault: the request that needed it gets a 503, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from tokenspeed.gateway.http.errors import ApiError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Key = tuple[str, str, str]
"""(kind, owner, id)."""


class BackendError(Exception):
    """The place where records are kept does not answer as it should; the message says what it said."""


class Backend(Protocol):
    """Keeps records. Every method may block and may raise `BackendError`."""

    def put(self, key: Key, body: bytes) -> None:
        """Write a record, over an old one of the same key."""

    def get(self, key: Key) -> bytes | None:
        """The record, if it is there."""

    def delete(self, key: Key) -> bool:
        """Whether there was one."""

    def list(self, kind: str, owner: str) -> list[tuple[str, bytes]]:
        """(id, record) of a kind, oldest first."""

    def close(self) -> None:
        """Give back what is held."""


class History:
    """The only way to a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._turn = asyncio.Lock()
        self._pending: dict[Key, bytes] = {}
        self._writers: set[asyncio.Task[None]] = set()

    def put(self, kind: str, owner: str, record_id: str, body: bytes) -> None:
        """Write soon; `get` sees it at once."""
        key = (kind, owner, record_id)
        self._pending[key] = body
        task = asyncio.get_running_loop().create_task(self._write(key, body))
        self._writers.add(task)
        task.add_done_callback(self._writers.discard)

    async def write(self, kind: str, owner: str, record_id: str, body: bytes) -> None:
        """Write, for who may not go on before it is there. Raises `ApiError` 503."""
        await self.settle()  # an earlier write of the same record must not come after this one
        await self._call(lambda: self._backend.put((kind, owner, record_id), body))

    async def get(self, kind: str, owner: str, record_id: str) -> bytes | None:
        """The record, if it is there. Raises `ApiError` 503."""
        key = (kind, owner, record_id)
        pending = self._pending.get(key)
        return pending if pending is not None else await self._call(lambda: self._backend.get(key))

    async def delete(self, kind: str, owner: str, record_id: str) -> bool:
        """Whether there was one. Raises `ApiError` 503."""
        await self.settle()
        return await self._call(lambda: self._backend.delete((kind, owner, record_id)))

    async def list(self, kind: str, owner: str) -> list[tuple[str, bytes]]:
        """(id, record) of a kind, oldest first. Raises `ApiError` 503."""
        await self.settle()
        return await self._call(lambda: self._backend.list(kind, owner))

    async def settle(self) -> None:
        """Wait for the writes that have been asked for; more may be asked for meanwhile, without end."""
        if self._writers:
            await asyncio.wait(set(self._writers))

    async def close(self) -> None:
        """Write what is left and close the backend."""
        while self._writers:
            await self.settle()
        await asyncio.to_thread(self._backend.close)

    async def _write(self, key: Key, body: bytes) -> None:
        try:
            await self._in_turn(lambda: self._backend.put(key, body))
        except BackendError as error:
            logger.error("a %s could not be stored: %s", key[0], error)
        finally:
            if self._pending.get(key) is body:
                del self._pending[key]

    async def _call(self, call: Callable[[], T]) -> T:
        try:
            return await self._in_turn(call)
        except BackendError as error:
            raise ApiError(503, "history_unavailable", f"stored records cannot be reached: {error}") from None

    def _in_turn(self, call: Callable[[], T]) -> Awaitable[T]:
        async def run() -> T:
            async with self._turn:
                return await asyncio.to_thread(call)

        return run()
