# SPDX-License-Identifier: MIT
"""Cross-origin requests: which pages of other origins may ask (`--cors-allowed-origins`). None, unless it says so.

A browser asks first (a preflight, which needs no key: it carries none), then reads the answer's headers. Cookies are
never part of it. Other clients ignore all this.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

_SHOWN = "x-request-id, x-smg-error-code, retry-after"
_METHODS = "GET, POST, PUT, PATCH, DELETE"
_PREFLIGHT_S = "600"


def allow_origins(app: web.Application, origins: Sequence[str]) -> None:
    """Answer preflights and mark answers for `origins`; "*" is any."""
    if not origins:
        return
    anyone = "*" in origins

    def allowed(request: web.Request) -> bool:
        origin = request.headers.get("origin")
        return origin is not None and (anyone or origin in origins)

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("access-control-request-method")
        if request.method != "OPTIONS" or asked is None or not allowed(request):
            return await handler(request)
        headers = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": request.headers.get("access-control-request-headers", ""),
            "access-control-max-age": _PREFLIGHT_S,
        }
        return web.Response(status=204, headers=headers)

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["vary"] = "origin"
        if allowed(request):
            response.headers["access-control-allow-origin"] = "*" if anyone else request.headers["origin"]
            response.headers["access-control-expose-headers"] = _SHOWN

    app.middlewares.insert(0, preflight)
    app.on_response_prepare.append(mark)
