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
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import zmq

from tokenspeed.config.gateway import GatewayConfig
from tokenspeed.config.gateway_history import HistoryConfig
from tokenspeed.config.member import Member
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.history.redis import RedisBackend
from tokenspeed.gateway.history.sqlite import SqliteBackend
from tokenspeed.gateway.history.store import Backend, BackendError, History
from tokenspeed.gateway.http.admin import AdminApi, Drain
from tokenspeed.gateway.http.admission import Admission, rate_limit
from tokenspeed.gateway.http.auth import KeyCheck
from tokenspeed.gateway.http.connections import Connections, LoopFaults, room_for_connections
from tokenspeed.gateway.http.gauges import WorkerGauges
from tokenspeed.gateway.http.logs import LogsUnwritable, configure_logs
from tokenspeed.gateway.http.priorities import PriorityAdmission
from tokenspeed.gateway.http.server import HttpOptions, Server
from tokenspeed.gateway.http.service import Service
from tokenspeed.gateway.http.sse import KeepAlive
from tokenspeed.gateway.listening import open_ports
from tokenspeed.gateway.model_start import load_model
from tokenspeed.gateway.openapi import openapi_route
from tokenspeed.gateway.responses.api import ResponsesApi
from tokenspeed.gateway.route.breaker import BreakerOptions, BreakerState
from tokenspeed.gateway.route.policies import make_policy
from tokenspeed.gateway.route.retry import RetryPolicy
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.route.shared_keys import SharedKeys
from tokenspeed.gateway.route.worker import Watcher, Worker, WorkerOptions, WorkerState
from tokenspeed.gateway.several.door import Door, Room
from tokenspeed.gateway.several.to_front import ToFront
from tokenspeed.gateway.start_error import StartError
from tokenspeed.observability.gateway_metrics import DURATION_BUCKETS_S, GatewayMetrics
from tokenspeed.observability.traces import TracesUnavailable, make_tracer
from tokenspeed.rpc.lane.address import AddressError
from tokenspeed.rpc.lane.base import LaneOptions

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_LOOK_S = 1.0
_WORKERS_COME_S = 1.0


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
    priorities = None if config.priorities is None else config.priorities.share(member.count)
    shared = replace(config, limits=limits, connections=connections, priorities=priorities)
    return replace(shared, port=member.port, history=history)


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
    metrics = GatewayMetrics(config.duration_buckets_s or DURATION_BUCKETS_S)
    reporting = _Reporting(metrics)
    async with AsyncExitStack() as stack:
        front = None if config.member is None else await stack.enter_async_context(ToFront(config.member))
        router = _router(config, front, reporting)
        # The lanes come first: an engine that is already waiting registers while the tokenizer loads.
        stack.callback(router.close)
        try:
            router.open()
        except (AddressError, zmq.ZMQError, OSError) as error:
            raise StartError(f"a worker's lane cannot be opened: {error}", 1) from None
        keep_alive = KeepAlive(config.sse_keepalive_s)
        service = _service(config, load_model(config, router, metrics), router, keep_alive, metrics)
        stack.callback(service.tracer.close)
        # A task of the group that dies takes the gateway with it: a fault of ours must not pass unseen.
        group = await stack.enter_async_context(_background())
        for task in (keep_alive.run(), _watch(service.gauges)):
            stack.callback(group.create_task(task).cancel)
        keys = KeyCheck(config.api_keys)
        admin = AdminApi(router, keys, group.create_task, Drain(config.upkeep.drain_settle_s, config.drain.grace_s))
        if config.upkeep.remove_unhealthy:
            reporting.on_lost = admin.lost
        stack.callback(admin.close)
        has_admin_port = config.listeners.admin_port is not None
        routes = [*(admin.public_routes() if has_admin_port else admin.routes()), openapi_route()]
        responses = _responses(stack, config.history, service, keys)
        if responses is not None:
            routes += responses.routes()
        http = config.connections
        asyncio.get_running_loop().set_exception_handler(LoopFaults())
        connections = Connections(room_for_connections(http.max_connections), http.header_timeout_s, metrics)
        server = Server(service, keys, _http_options(config, connections), routes)
        if config.member is not None:
            await _let_workers_come(router)
        port = await open_ports(stack, config, server, service, admin.routes(), connections)
        if front is not None:
            stop_response = _nothing_to_stop if responses is None else responses.stop
            await _open_door(stack, front, service, admin, stop_response)
        yield service, port


def _router(config: GatewayConfig, front: ToFront | None, watcher: Watcher) -> Router:
    """front: the process that knows the workers of several gateways; None: this one is alone."""
    if front is None:
        return Router(config.worker_urls, make_policy(config.routing), _worker_options(config, {}), watcher)
    keys = SharedKeys(front.key)
    router = Router(front.urls, make_policy(config.routing, keys), _worker_options(config, front.lanes), watcher)
    if config.routing.sticky or config.routing.policy == "manual":
        router.keys = keys
    return router


def _worker_options(config: GatewayConfig, private: Mapping[str, tuple[str, str]]) -> WorkerOptions:
    return WorkerOptions(
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
        private=private,
    )


def _service(
    config: GatewayConfig, model: ServedModel, router: Router, keep_alive: KeepAlive, metrics: GatewayMetrics
) -> Service:
    """Raises `StartError`."""
    limits = config.limits
    service = Service(
        model,
        router,
        _admission(config, metrics),
        RetryPolicy(**asdict(config.retry)),
        keep_alive,
        metrics,
        limits.request_timeout_s,
    )
    service.key_headers = (*config.routing.key_headers, *service.key_headers)
    try:
        service.tracer = make_tracer("tokenspeed-gateway", config.traces.endpoint)
    except TracesUnavailable as error:
        raise StartError(f"--enable-trace: {error}", 2) from None
    return service


def _admission(config: GatewayConfig, metrics: GatewayMetrics) -> Admission | PriorityAdmission:
    limits = config.limits
    rate = rate_limit(limits.requests_per_s, limits.max_concurrent_requests)
    if config.priorities is not None:
        return PriorityAdmission(limits.max_concurrent_requests, config.priorities, rate, metrics.scheduler)
    return Admission(limits.max_concurrent_requests, limits.queue_size, limits.queue_timeout_s, rate)


def _http_options(config: GatewayConfig, connections: Connections) -> HttpOptions:
    return HttpOptions(
        config.limits.max_payload_bytes,
        config.request_id_headers,
        config.connections.stall_s,
        config.connections.cors_origins,
        connections,
        config.logs.access_fields,
    )


def _responses(stack: AsyncExitStack, config: HistoryConfig, service: Service, keys: KeyCheck) -> ResponsesApi | None:
    """The API of stored responses; None without a history. Raises `StartError`."""
    if config.backend == "none":
        return None
    history = History(_history_backend(config))
    stack.push_async_callback(history.close)
    responses = ResponsesApi(service, keys, history, config.max_background)
    stack.push_async_callback(responses.close)
    return responses


async def _open_door(
    stack: AsyncExitStack,
    front: ToFront,
    service: Service,
    admin: AdminApi,
    stop_response: Callable[[str], Awaitable[None]],
) -> None:
    """Meet the other gateway processes on the port: what one of them is asked that concerns all, all do."""
    room = Room(
        metrics=service.own_metrics,
        ready=lambda: bool(service.router.ready()),
        loads=admin.own_loads,
        stop=stop_response,
        flushed=admin.were_flushed,
        seated=lambda seating: front.apply(seating, service.router, admin.retire),
        retired=admin.retired,
    )
    door = Door(front.member, room)
    admin.others = door
    service.others_ready = door.others_ready
    service.totals, service.stop_elsewhere = door.metrics, door.stop_everywhere
    admin.front = front
    await door.open()
    stack.push_async_callback(door.close)
    room.seated(await front.seating())  # what changed before the door was open


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
