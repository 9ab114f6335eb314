# SPDX-License-Identifier: MIT
"""The HTTP library's protocol, but for what it says of bytes that are no HTTP request.

Such a connection gets the JSON of any other error and is closed; anybody can send garbage, so the log has a line of it
for those who debug, and no traceback. A fault of ours goes the library's way. One object a connection, on the loop's
thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from aiohttp import HttpVersion11, web

from tokenspeed.gateway.http.errors import ApiError

logger = logging.getLogger(__name__)


class Protocol(web.RequestHandler):
    """One connection of `server`."""

    __slots__ = ()

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, idle_s: float) -> None:
        """idle_s: how long the connection may wait for a next request."""
        no_log: Any = None  # which the library takes, and does not declare
        # Packed bodies are unpacked where they are read.
        super().__init__(server, loop=loop, access_log=no_log, keepalive_timeout=idle_s, auto_decompress=False)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what cannot be read, or to a fault."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        reason = " ".join((message or "").split("\n", 1)[0].split()).rstrip(":")
        logger.debug("what %s sent is no HTTP request: %s", request.remote, reason)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        error = ApiError(status, "invalid_http", f"this is no HTTP request: {reason}")
        response = web.Response(body=error.body, status=status, content_type="application/json", headers=error.headers)
        response.force_close()
        return response


def expecting(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """The same routes, which answer an `Expect` header that nobody knows with JSON too."""
    return [
        web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": _expected})
        for route in routes
    ]


async def _expected(request: web.Request) -> None:
    """Before the body is read: whether the client is to send it."""
    if request.version < HttpVersion11:
        return
    if request.headers.get("expect", "").lower() != "100-continue":
        error = ApiError(417, "expectation_failed", "of expectations, only 100-continue is known")
        text = error.body.decode()
        raise web.HTTPExpectationFailed(text=text, content_type="application/json", headers=error.headers)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
