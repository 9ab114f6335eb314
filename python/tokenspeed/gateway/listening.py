# SPDX-License-Identifier: MIT
"""The ports of a gateway process: each a place, an application, and what its connections may do."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from tokenspeed.config.gateway import GatewayConfig
from tokenspeed.gateway.http.connections import ACCEPTS_AT_ONCE, Connections
from tokenspeed.gateway.http.protocol import Protocol
from tokenspeed.gateway.http.server import Server, metrics_response
from tokenspeed.gateway.http.service import Service
from tokenspeed.gateway.start_error import StartError

_WAITING_CONNECTIONS = 1024
"""In the system's queue, of the listener."""
_IDLE_S = 75.0
"""Of a connection of probes or metrics."""


async def open_ports(
    stack: AsyncExitStack,
    config: GatewayConfig,
    server: Server,
    service: Service,
    admin_routes: Sequence[web.RouteDef],
    connections: Connections,
) -> int:
    """All that the configuration names, until the stack unwinds; the port that requests come to. admin_routes: where
    they have a port of their own. Raises `StartError`."""
    shared, tls, idle_s = config.member is not None, _tls(config), config.limits.idle_connection_timeout_s
    listeners = config.listeners
    port = await _listen(stack, server.app, _Place(config.host, config.port, idle_s, tls, shared, connections))
    if config.prometheus_port is not None:
        host = config.prometheus_host or config.host
        await _listen(stack, _metrics_app(service), _Place(host, config.prometheus_port, _IDLE_S, None, shared))
    if listeners.admin_port is not None:
        place = _Place(listeners.admin_host, listeners.admin_port, idle_s, tls, shared)
        await _listen(stack, server.side_app(admin_routes), place)
    if listeners.health_port is not None:
        place = _Place(config.host, listeners.health_port, _IDLE_S, tls, shared)
        await _listen(stack, server.side_app([]), place)
    return port


@dataclass(frozen=True)
class _Place:
    """Where to listen and how. `shared`: with other gateway processes. `connections`: who limits them; None: nobody."""

    host: str
    port: int
    idle_s: float
    tls: ssl.SSLContext | None
    shared: bool
    connections: Connections | None = None


async def _listen(stack: AsyncExitStack, app: web.Application, place: _Place) -> int:
    """Serve `app`; the port. Raises `StartError`."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    plain = partial(Protocol, runner.server, loop, place.idle_s)
    make = plain if place.connections is None else place.connections.watched(plain)
    try:
        listener = await loop.create_server(
            make, place.host, place.port, ssl=place.tls, backlog=ACCEPTS_AT_ONCE, reuse_port=place.shared or None
        )
    except OSError as error:
        raise StartError(f"cannot listen on {place.host}:{place.port}: {error.strerror or error}", 1) from None
    stack.callback(listener.close)
    for sock in listener.sockets:
        with socket.socket(fileno=os.dup(sock.fileno())) as same:
            same.listen(_WAITING_CONNECTIONS)
    return int(listener.sockets[0].getsockname()[1])


def _tls(config: GatewayConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(config.tls_cert, config.tls_key)
    return context


def _metrics_app(service: Service) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        return await metrics_response(service)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    return app
