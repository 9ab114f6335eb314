# SPDX-License-Identifier: MIT
"""Connections of the main listener: how many there are, and how long the head of a request may take.

The HTTP library has neither limit, so its protocol objects are wrapped: what arrives is passed on, watched. A
connection over the limit is told 503 and closed; one whose head does not end in time is told 408. Waiting for a next
request is not limited here (the library's idle timeout is). Lives on the loop's thread.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

from tokenspeed.gateway.http.timeouts import Timeouts
from tokenspeed.observability.gateway_metrics import GatewayMetrics

logger = logging.getLogger(__name__)

Make = Callable[[], asyncio.Protocol]
ACCEPTS_AT_ONCE = 16
"""Connections that the loop takes in one turn. It takes a few turns until one that is refused is closed."""
_OWN_FILES = 128
"""Files that are no connections, or none that is served: lanes to engines, the history, the loop's own."""
_MOST_FILES = 1_048_576
_NO_FILES_LEFT = (errno.EMFILE, errno.ENFILE)
_SAY_AGAIN_S = 10.0


def room_for_connections(asked: int) -> int:
    """How many may be open: `asked`, or (0) as many as this process may open files, whose limit is raised as far as
    the system lets it. One more would leave the listener without a file, and everybody without an answer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    files = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    room = max(files - _OWN_FILES, files // 2)
    return min(asked, room) if asked else room


class LoopFaults:
    """What the loop tells of faults that no task has: as it is, but for connections that cannot be accepted for want of
    a file, of which it tells a thousand a second."""

    def __init__(self) -> None:
        self._said_s = -_SAY_AGAIN_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_FILES_LEFT:
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._said_s + _SAY_AGAIN_S:
            self._said_s = time.monotonic()
            logger.error("no connection can be accepted: %s (see --max-connections and ulimit -n)", error.strerror)


class Connections:
    """`limit` and `head_timeout_s`: 0 is none."""

    def __init__(self, limit: int, head_timeout_s: float, metrics: GatewayMetrics) -> None:
        self.limit, self.metrics = limit, metrics
        self.heads = Timeouts(head_timeout_s) if head_timeout_s else None
        """Heads that have begun to arrive."""
        self.open: dict[asyncio.BaseTransport, _Connection] = {}

    def watched(self, make: Make) -> Make:
        """A factory of watched protocols, from one of the library's."""
        return lambda: _Connection(self, make())

    def begun(self, transport: asyncio.BaseTransport | None) -> None:
        """The head of a request is there."""
        connection = self.open.get(transport) if transport is not None else None
        if connection is not None:
            connection.begun()

    def ended(self, transport: asyncio.BaseTransport | None) -> None:
        """Its answer is made; what comes next is another head."""
        connection = self.open.get(transport) if transport is not None else None
        if connection is not None:
            connection.busy = False


class _Connection(asyncio.Protocol):
    def __init__(self, owner: Connections, inner: asyncio.Protocol) -> None:
        self.busy = False
        """A request is being answered."""
        self._owner, self._inner = owner, inner
        self._transport: asyncio.Transport
        self._refused = False

    def begun(self) -> None:
        self.busy = True
        self._head_ended()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        owner = self._owner
        if owner.limit and len(owner.open) >= owner.limit:
            self._refused = True
            owner.metrics.connection_refused()
            _say(transport, "503 Service Unavailable")
            return
        owner.open[transport] = self
        owner.metrics.connections(len(owner.open))
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        heads = self._owner.heads
        if heads is not None and not self.busy:
            heads.begin(self._too_slow)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._refused else self._inner.eof_received()

    def pause_writing(self) -> None:
        if not self._refused:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if not self._refused:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ended()
        if not self._refused:
            self._owner.open.pop(self._transport, None)
            self._owner.metrics.connections(len(self._owner.open))
            self._inner.connection_lost(exc)

    def _head_ended(self) -> None:
        if self._owner.heads is not None:
            self._owner.heads.end(self._too_slow)

    def _too_slow(self) -> None:
        self._owner.metrics.connection_timed_out()
        _say(self._transport, "408 Request Timeout")


def _say(transport: asyncio.Transport, status: str) -> None:
    transport.write(f"HTTP/1.1 {status}\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n".encode())
    transport.close()
