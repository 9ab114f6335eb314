# SPDX-License-Identifier: MIT
"""Server-sent events over one response, with comments while nothing else is sent.

The head goes out with the first bytes, so a request that fails before its first token still gets a status of its
own. One ticker serves all open streams: a timer for each would cost more than the tokens.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import NoReturn

from aiohttp import HttpVersion11, web

from tokenspeed.gateway.http.body import STALL_S

_COMMENT = b": keep-alive\n\n"
_TICK_S = 1.0
_SMALL = 16_384
"""Bytes that the response takes without waiting for the client."""
_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}


class _Response(web.StreamResponse):
    _send_headers_immediately = False  # but with the first bytes behind them: a packet and a system call less


class EventStream:
    """The answer of one streaming request."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self.started = False
        """Whether the head of the response is out."""
        self.answered = False
        """Whether some of the answer is out (comments are none)."""
        self.last_write_s = time.monotonic()
        self._request = request
        self._transport: asyncio.Transport | None = None
        """Where chunks may be written without asking the response; None before its head is out."""
        self._opening = asyncio.Lock()
        stall_s = request.app.get(STALL_S, math.inf)
        self._stall_s = None if math.isinf(stall_s) else stall_s
        self.response = _Response(headers={**_HEADERS, **headers})

    async def write(self, data: bytes) -> None:
        """Send whole events. Raises `ConnectionError` when the client has left."""
        self.answered = True
        transport = self._transport
        if transport is not None and _is_free(transport):
            # An event a token: the way through the response would cost as much as making the event.
            self.last_write_s = time.monotonic()
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            return
        await self._write(data)

    async def comment(self) -> None:
        """Send something that clients ignore. Raises `ConnectionError` when the client has left."""
        await self._write(_COMMENT)

    async def finish(self, last: bytes) -> None:
        """End the response with the events `last`. Raises `ConnectionError` when the client has left."""
        if not self.started:
            await self._open()
        if last and not (len(last) <= _SMALL and _is_free(self._request.transport)):
            await self._write(last)
            last = b""
        await self.response.write_eof(last)

    async def _write(self, data: bytes) -> None:
        if not self.started:
            await self._open()
        self.last_write_s = time.monotonic()
        if len(data) <= _SMALL and _is_free(self._request.transport):
            await self.response.write(data)
        else:
            await self._write_patiently(data)
        if self.response.chunked:
            self._transport = self._request.transport

    async def _write_patiently(self, data: bytes) -> None:
        """The client may have to be waited for."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write(data)
        except TimeoutError:
            self._leave()

    def _leave(self) -> NoReturn:
        """What the client has not taken for so long, it will not take; closing in peace would wait for it too."""
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ConnectionResetError("the client takes nothing of its stream")

    async def _open(self) -> None:
        async with self._opening:
            if not self.started:
                if self._request.version >= HttpVersion11:
                    self.response.enable_chunked_encoding()
                await self.response.prepare(self._request)
                self.started = True


def _is_free(transport: asyncio.Transport | None) -> bool:
    """Whether the system takes what is written at once."""
    return transport is not None and not transport.get_write_buffer_size() and not transport.is_closing()


class KeepAlive:
    """Sends a comment on every registered stream that was silent for `interval_s` (0: never)."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._streams: set[EventStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, stream: EventStream) -> None:
        """Watch a stream until `discard`."""
        self._streams.add(stream)

    def discard(self, stream: EventStream) -> None:
        """The stream has ended."""
        self._streams.discard(stream)

    async def run(self) -> None:
        """Tick until cancelled."""
        while self._interval_s > 0:
            await asyncio.sleep(min(_TICK_S, self._interval_s))
            silent_since_s = time.monotonic() - self._interval_s
            for stream in [stream for stream in self._streams if stream.last_write_s < silent_since_s]:
                # A client that reads slowly must not hold up the others' comments.
                task = asyncio.create_task(self._comment(stream))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _comment(self, stream: EventStream) -> None:
        try:
            await stream.comment()
        except ConnectionError:
            # The request's own task notices too, and cleans up.
            self.discard(stream)
