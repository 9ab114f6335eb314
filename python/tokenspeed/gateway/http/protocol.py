# SPDX-License-Identifier: MIT
"""The HTTP library's protocol, but for what it says of bytes that are no HTTP request.

Such a connection gets the JSON of any other error and is closed; anybody can send garbage, so the log has a line of it
for those who debug, and no traceback. A fault of ours goes the library's way. One object a connection, on the loop's
thread.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web

from tokenspeed.gateway.http.errors import ApiError

logger = logging.getLogger(__name__)


class Protocol(web.RequestHandler):
    """One connection of `server`."""

    __slots__ = ()

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, idle_s: float) -> None:
        """idle_s: how long the connection may wait for a next request."""
        no_log: Any = None  # which the library takes, and does not declare
        super().__init__(server, loop=loop, access_log=no_log, keepalive_timeout=idle_s)

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
        code, said = "invalid_http", f"this is no HTTP request: {reason}"
        if reason.startswith("Can not decode content-encoding"):
            status, code = 415, "unsupported_encoding"
            said = "the body is encoded in a way that this server cannot read; gzip and deflate are"
        error = ApiError(status, code, said)
        response = web.Response(body=error.body, status=status, content_type="application/json", headers=error.headers)
        response.force_close()
        return response
