# SPDX-License-Identifier: MIT
"""The gateway process: builds its parts from a `GatewayConfig`, runs until a signal, drains, and returns a status.

`run` owns the asyncio loop and everything on it; nothing else in the gateway starts a thread or handles a signal.
SIGTERM or SIGINT: readiness turns 503 at once; requests are taken for the settle time; then those in flight have the
grace time to finish; what is left is told that the server stopped. A second signal ends the waiting.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import zmq
from aiohttp import web

from tokenspeed.config.gateway import GatewayConfig
from tokenspeed.config.gateway_history import HistoryConfig
from tokenspeed.config.gateway_http import TokenizerCacheConfig
from tokenspeed.config.member import Member
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import resolve_model
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.history.redis import RedisBackend
from tokenspeed.gateway.history.sqlite import SqliteBackend
from tokenspeed.gateway.history.store import Backend, BackendError, History
from tokenspeed.gateway.http.admin import AdminApi, Drain
from tokenspeed.gateway.http.admission import Admission
from tokenspeed.gateway.http.auth import KeyCheck
from tokenspeed.gateway.http.connections import ACCEPTS_AT_ONCE, Connections, LoopFaults, room_for_connections
from tokenspeed.gateway.http.gauges import WorkerGauges
from tokenspeed.gateway.http.logs import LogsUnwritable, configure_logs
from tokenspeed.gateway.http.protocol import Protocol
from tokenspeed.gateway.http.server import HttpOptions, Server, metrics_response
from tokenspeed.gateway.http.service import Service
from tokenspeed.gateway.http.sse import KeepAlive
from tokenspeed.gateway.openapi import openapi_route
from tokenspeed.gateway.responses.api import ResponsesApi
from tokenspeed.gateway.route.breaker import BreakerOptions, BreakerState
from tokenspeed.gateway.route.policies import make_policy
from tokenspeed.gateway.route.retry import RetryPolicy
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.route.worker import Worker, WorkerOptions, WorkerState
from tokenspeed.gateway.several.door import Door, Room
from tokenspeed.gateway.text.builtin_templates import BUILT_IN
from tokenspeed.gateway.text.parse.names import Parsers, UnknownParser, parsers_named
from tokenspeed.gateway.text.template import ChatTemplate, TemplateError
from tokenspeed.gateway.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tokenspeed.gateway.text.tokenizer_cache import CacheSizes, TokenizerCache
from tokenspeed.observability.gateway_metrics import DURATION_BUCKETS_S, GatewayMetrics
from tokenspeed.observability.traces import TracesUnavailable, make_tracer
from tokenspeed.rpc.lane.address import AddressError
from tokenspeed.rpc.lane.base import LaneOptions

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_WAITING_CONNECTIONS = 1024
"""In the system's queue, of the listener."""
_LOOK_S = 1.0
_WORKERS_COME_S = 1.0


class StartError(Exception):
    """The gateway cannot start; one line that names what is wrong. `status` is the exit status: 2 when the command
    line or a file that it names is wrong, 1 when this machine is in the way (a port in use)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0 after a shutdown, else `StartError`'s."""
    try:
        configure_logs(config.logs)
    except LogsUnwritable as error:
        print(f"smg launch: error: {error}", file=sys.stderr)
        return 2
    if config.member is not None:
        config = share_of(config, config.member)
    try:
        asyncio.run(_serve(config))
    except StartError as error:
        print(f"smg launch: error: {error}", file=sys.stderr)
        return error.status
    return 0


def share_of(config: GatewayConfig, member: Member) -> GatewayConfig:
    """What one of several gateway processes runs with: its part of the limits, and a history that all can read."""
    limits = replace(
        config.limits,
        max_concurrent_requests=member.share(config.limits.max_concurrent_requests),
        queue_size=member.share(config.limits.queue_size),
        requests_per_s=config.limits.requests_per_s / member.count,
    )
    connections = replace(config.connections, max_connections=member.share(config.connections.max_connections))
    history = config.history
    if history.backend == "memory" or (history.backend == "sqlite" and not history.has_file):
        history = replace(history, backend="sqlite", path=member.history_path)
    return replace(config, port=member.port, limits=limits, connections=connections, history=history)


async def _serve(config: GatewayConfig) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with gateway(config) as (service, port):
        settle_memory()
        logger.info("listening on %s:%d", config.host, port)
        await stop.wait()
        await _drain(service, config, hurry)


def settle_memory() -> None:
    """What the start has made stays for good; and requests make few cycles. A collector that looks at everything every
    700 allocations takes a sixth of a busy gateway's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


async def _drain(service: Service, config: GatewayConfig, hurry: asyncio.Event) -> None:
    service.stopping = True
    deadline = time.monotonic() + config.drain.settle_s
    while time.monotonic() < deadline and not hurry.is_set():
        await asyncio.sleep(_POLL_S)
    service.draining = True
    logger.info("draining: %d request(s) in flight", service.num_open)
    deadline = time.monotonic() + config.drain.grace_s
    while service.num_open and time.monotonic() < deadline and not hurry.is_set():
        await asyncio.sleep(_POLL_S)
    if service.num_open:
        logger.warning("stopping with %d request(s) in flight", service.num_open)
        # Each of them ends with an error of its own, which the client can read.
        service.router.close()
        await asyncio.sleep(2 * _POLL_S)


@asynccontextmanager
async def gateway(config: GatewayConfig) -> AsyncIterator[tuple[Service, int]]:
    """A running gateway: its service and the port it listens on. Raises `StartError`."""
    # The lanes come first: an engine that is already waiting registers while the tokenizer loads.
    metrics = GatewayMetrics(config.duration_buckets_s or DURATION_BUCKETS_S)
    options = WorkerOptions(
        lane=LaneOptions(
            config.engine_count,
            None,
            config.engine_startup_timeout_s,
            config.curve,
            config.grpc,
            config.by_tokens,
        ),
        stall_s=config.stall_s,
        breaker=BreakerOptions(**asdict(config.breaker)),
        silent_s=config.routing.stall_s,
        wedged_s=config.routing.wedge_s,
        tokens_per_s=config.routing.prices.tokens_per_s,
        overload=config.routing.overload if config.routing.overload.protects else None,
        private={} if config.member is None else config.member.private_lanes(config.worker_urls),
    )
    reporting = _Reporting(metrics)
    router = Router(config.worker_urls, make_policy(config.routing), options, reporting)
    async with AsyncExitStack() as stack:
        stack.callback(router.close)
        try:
            router.open()
        except (AddressError, zmq.ZMQError, OSError) as error:
            raise StartError(f"a worker's lane cannot be opened: {error}", 1) from None
        model = load_model(config, router, metrics)
        keep_alive = KeepAlive(config.sse_keepalive_s)
        limits = config.limits
        service = Service(
            model,
            router,
            Admission(limits.max_concurrent_requests, limits.queue_size, limits.queue_timeout_s, limits.requests_per_s),
            RetryPolicy(**asdict(config.retry)),
            keep_alive,
            metrics,
            limits.request_timeout_s,
        )
        try:
            service.tracer = make_tracer("tokenspeed-gateway", config.traces.endpoint)
        except TracesUnavailable as error:
            raise StartError(f"--enable-trace: {error}", 2) from None
        stack.callback(service.tracer.close)
        service.key_headers = (*config.routing.key_headers, *service.key_headers)
        # A task of the group that dies takes the gateway with it: a fault of ours must not pass unseen.
        group = await stack.enter_async_context(_background())
        for task in (keep_alive.run(), _watch(service.gauges)):
            stack.callback(group.create_task(task).cancel)
        keys = KeyCheck(config.api_keys)
        stop_response: Callable[[str], Awaitable[None]] = _nothing_to_stop
        admin = AdminApi(router, keys, group.create_task, Drain(config.upkeep.drain_settle_s, config.drain.grace_s))
        if config.upkeep.remove_unhealthy:
            reporting.on_lost = admin.retire
        stack.callback(admin.close)
        has_admin_port = config.listeners.admin_port is not None
        routes = [*(admin.public_routes() if has_admin_port else admin.routes()), openapi_route()]
        if config.history.backend != "none":
            history = History(_history_backend(config.history))
            stack.push_async_callback(history.close)
            responses = ResponsesApi(service, keys, history, config.history.max_background)
            stack.push_async_callback(responses.close)
            routes += responses.routes()
            stop_response = responses.stop
        http = config.connections
        asyncio.get_running_loop().set_exception_handler(LoopFaults())
        connections = Connections(room_for_connections(http.max_connections), http.header_timeout_s, metrics)
        http_options = HttpOptions(
            limits.max_payload_bytes,
            config.request_id_headers,
            http.stall_s,
            http.cors_origins,
            connections,
            config.logs.access_fields,
        )
        server = Server(service, keys, http_options, routes)
        shared = config.member is not None
        if shared:
            await _let_workers_come(router)
        idle_s, tls = limits.idle_connection_timeout_s, _tls(config)
        main = _Place(config.host, config.port, idle_s, tls, shared, connections)
        port = await _listen(stack, server.app, main)
        if config.prometheus_port is not None:
            place = _Place(config.prometheus_host or config.host, config.prometheus_port, 75.0, None, shared)
            await _listen(stack, _metrics_app(service), place)
        if config.listeners.admin_port is not None:
            place = _Place(config.listeners.admin_host, config.listeners.admin_port, idle_s, tls, shared)
            await _listen(stack, server.side_app(admin.routes()), place)
        if config.listeners.health_port is not None:
            await _listen(
                stack, server.side_app([]), _Place(config.host, config.listeners.health_port, 75.0, tls, shared)
            )
        if config.member is not None:
            room = Room(
                metrics=service.own_metrics,
                ready=lambda: bool(router.ready()),
                loads=admin.own_loads,
                stop=stop_response,
                flushed=admin.were_flushed,
            )
            door = Door(config.member, room)
            admin.others = door
            service.others_ready = door.others_ready
            service.totals, service.stop_elsewhere = door.metrics, door.stop_everywhere
            admin.fixed_workers = True
            await door.open()
            stack.push_async_callback(door.close)
        yield service, port


@asynccontextmanager
async def _background() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks. What keeps the gateway from starting comes out as it is, not packed as the group packs it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        start = errors.subgroup(StartError)
        if start is None:
            raise
        raise start.exceptions[0] from None


async def _let_workers_come(router: Router) -> None:
    """The other processes on the port may serve already: this one should not take a connection and say 503. Engines
    that are there are on its lanes in a moment; those that are not are not waited for."""
    deadline = time.monotonic() + _WORKERS_COME_S
    while len(router.ready()) < len(router.workers) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


async def _nothing_to_stop(response_id: str) -> None:
    """Without a history there are no background responses."""


def _history_backend(config: HistoryConfig) -> Backend:
    """Where responses and conversations are kept. Raises `StartError`."""
    try:
        if config.backend == "redis":
            assert config.redis_url is not None
            return RedisBackend(config.redis_url, config.retention_s, config.op_timeout_s, config.pool_size)
        if config.backend == "memory":
            return SqliteBackend(None, config.retention_s, _memory_limits(config))
        if config.path is not None:
            return SqliteBackend(Path(config.path), config.retention_s)
        return _default_backend(config)
    except ImportError:
        raise StartError("--history-backend redis: the Python package redis is not installed", 2) from None
    except BackendError as error:
        raise StartError(f"--history-backend {config.backend}: {error}", 2) from None


def _default_backend(config: HistoryConfig) -> Backend:
    """Nobody asked for a file, so a home that cannot be written (a container's) does not stop the start."""
    try:
        return SqliteBackend(Path(config.default_path), config.retention_s)
    except BackendError as error:
        logger.warning("stored responses are kept in memory only: %s", error)
        return SqliteBackend(None, config.retention_s, _memory_limits(config))


def _memory_limits(config: HistoryConfig) -> dict[str, int]:
    return {"response": config.memory_responses, "item:": config.memory_items}


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


def load_model(config: GatewayConfig, router: Router, metrics: GatewayMetrics) -> ServedModel:
    """The tokenizer and the template that the configuration names. Raises `StartError`."""
    try:
        source = resolve_model(config.model_path)
        path = source.path if config.tokenizer_path is None else resolve_model(config.tokenizer_path).path
        tokenizer = load_tokenizer(path)
        tokenizer.prefer(config.preferred_sampling)
    except (ModelError, TokenizerError) as error:
        raise StartError(str(error), 2) from None
    names = [source.name, *config.model_aliases]
    if config.model_path is not None:
        names.append(config.model_path)
    template = _template(config, tokenizer)
    cache = _tokenizer_cache(config.tokenizer_cache, tokenizer, metrics)
    model = ServedModel(names, tokenizer, template, _parsers(config, template), router, cache)
    model.keep_reasoning = config.keep_reasoning
    return model


def _tokenizer_cache(
    config: TokenizerCacheConfig, tokenizer: Tokenizer, metrics: GatewayMetrics
) -> TokenizerCache | None:
    if not (config.exact_bytes or config.prefix_bytes):
        return None
    sizes = CacheSizes(config.exact_entries, config.exact_bytes, config.prefix_bytes)
    return TokenizerCache(tokenizer, sizes, metrics.tokenizer_lookup)


def _parsers(config: GatewayConfig, template: ChatTemplate | None) -> Parsers:
    source = template.source if template is not None else ""
    try:
        return parsers_named(config.reasoning_parser, config.tool_call_parser, source)
    except UnknownParser as error:
        raise StartError(str(error), 2) from None


def _template(config: GatewayConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = tokenizer.facts.chat_template
    if config.chat_template in BUILT_IN:
        source = BUILT_IN[config.chat_template]
    elif config.chat_template is not None:
        try:
            source = Path(config.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            names = ", ".join(BUILT_IN)
            message = f"--chat-template: {config.chat_template} is none of {names}, and no file: {error.strerror}"
            raise StartError(message, 2) from None
    if source is None:
        return None
    specials = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    try:
        return ChatTemplate(source, {name: token for name, token in specials.items() if token is not None})
    except TemplateError as error:
        raise StartError(str(error), 2) from None


class _Reporting:
    """Tells the metrics what happens to workers."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self.on_lost: Callable[[Worker], None] | None = None
        """Hears of workers that were ready and are no more; None: they are waited for."""

    def health(self, worker: Worker) -> None:
        is_ready = worker.state() is WorkerState.READY
        self._metrics.workers.health(worker.url, is_ready)
        if self.on_lost is not None and worker.ready_s and worker.state() in (WorkerState.ABSENT, WorkerState.STALLED):
            self.on_lost(worker)

    def breaker(self, worker: Worker, old: BreakerState, new: BreakerState) -> None:
        self._metrics.workers.breaker_changed(worker.url, old.name.lower(), new.name.lower())


async def _watch(gauges: WorkerGauges) -> None:
    while True:
        gauges.refresh()
        await asyncio.sleep(_LOOK_S)
