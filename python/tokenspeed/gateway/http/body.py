# SPDX-License-Identifier: MIT
"""Bodies of requests, read with a limit on silence (a client that sends nothing more must not be waited for), and
unpacked."""

from __future__ import annotations

import asyncio
import math

from aiohttp import web

from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.http.inflate import unpacked

STALL_S = web.AppKey("stall_s", float)
"""A client that sends or takes nothing for this long has left; infinite for no limit."""


async def read_body(request: web.Request) -> bytes:
    """The whole body, unpacked. Raises `ApiError`: 408 for a client that stops in the middle, and what `unpacked`
    raises."""
    body = await _received(request)
    encoding = request.headers.get("content-encoding")
    if encoding is None:
        return body
    return await unpacked(body, encoding.strip().lower(), request.client_max_size)


async def _received(request: web.Request) -> bytes:
    """The body as it came."""
    stall_s = request.app.get(STALL_S, math.inf)
    limit = request.client_max_size
    body = bytearray()
    if request.content.is_eof() and request.content.total_bytes <= (limit or math.inf):
        whole = request.content.read_nowait()  # it came with its head, as most do: there is nothing to wait for
        if request.content.at_eof():
            return whole
        body += whole
    if limit and (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length or 0)
    try:
        while True:
            async with asyncio.timeout(None if math.isinf(stall_s) else stall_s):
                chunk = await request.content.readany()
            if not chunk:
                return bytes(body)
            body += chunk
            if limit and len(body) > limit:
                raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(body))
    except TimeoutError:
        raise ApiError(408, "request_body_timeout", f"nothing of the body came for {stall_s:g} s") from None
