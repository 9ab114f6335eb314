# SPDX-License-Identifier: MIT
"""The gateway's end of an engine behind gRPC: one `GrpcLane` a worker URL (`grpc://host:port`, `grpcs://` with TLS),
on the asyncio loop.

It has the face of `GatewayLane`, so whoever routes does not tell them apart: it connects and connects again, says when
the engine is there, sends requests, pushes their rows into sinks, and turns the loss of the connection into one `fail`
a request in flight. Each request is one call of its own; that is what the protocol costs against the ZMQ lane.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from tokenspeed.config.gateway_workers import GrpcTls
from tokenspeed.rpc.grpc.call.convert import to_batch, to_ready, to_refusal, to_request, to_timeout
from tokenspeed.rpc.grpc.call.kv_events import Cache, follow
from tokenspeed.rpc.grpc.limits import keepalive_options, max_message_bytes, message_options
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.address import split_grpc
from tokenspeed.rpc.lane.base import Lane, LaneNotReady, LaneOptions, LaneState, RequestSink
from tokenspeed.rpc.lane.rank import Rank
from tokenspeed_protos import common_pb2
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb
from tokenspeed_protos.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub

logger = logging.getLogger(__name__)

_CALL_S = 10.0
_PROFILE_S = 600.0  # writing a long trace takes minutes
_RETRY_S = 0.5
_WATCH_S = 1.0
_SILENT_S = 2.0
"""After this long without a row while there is work, the engine is asked whether it lives."""
_BACKOFF = [
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


@dataclass
class _Call:
    """A request in flight and the task that reads its answer."""

    sink: RequestSink
    rank: Rank
    task: asyncio.Task[None]


class GrpcLane(Lane):
    """A channel to one engine, and the calls on it."""

    def __init__(self, url: str, options: LaneOptions, on_state: Callable[[LaneState, str], None]) -> None:
        super().__init__(url, options, on_state)
        self._limits = options.grpc
        self._calls: dict[str, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel: grpc.aio.Channel | None = None
        self._stub: TokenSpeedSchedulerStub
        self._life: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._checked_s = 0.0
        self._num_failed = 0
        """Health checks that failed in a row."""
        self._num_owed = 0
        """Good ones that a sick worker has to show."""
        self._was_ready = False
        self._why = ""
        """Why it was lost last."""

    # ---- life ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to connect. Raises `AddressError`."""
        secure, target = split_grpc(self.url)
        options = [*message_options(max_message_bytes()), *keepalive_options(), *_BACKOFF]
        if secure:
            self._channel = grpc.aio.secure_channel(target, _credentials(self._limits.tls), options)
        else:
            self._channel = grpc.aio.insecure_channel(target, options)
        self._stub = TokenSpeedSchedulerStub(self._channel)
        self._set_state(LaneState.HANDSHAKE, f"connecting to {target}")
        self._life = asyncio.get_running_loop().create_task(self._live(self._channel))

    def close(self) -> None:
        """Leave the engine; requests in flight fail. May be called twice."""
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        if self._life is not None:
            self._life.cancel()
        self._lose("the gateway is stopping")
        self._spawn(channel.close(None))
        self._set_state(LaneState.CLOSED, "closed")

    # ---- requests --------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Requests sent and not yet finished, aborted or failed."""
        return len(self._calls)

    def submit(self, request: wire.PlainGenerateReqInput | wire.TokenizedGenerateReqInput, sink: RequestSink) -> None:
        """Send a request to the rank that is next. Raises `LaneNotReady` or `NoSuchRank`; then nothing was sent."""
        rank = self._next_rank(request.rid, request.rid in self._calls, self._named_rank(request))
        sent = to_request(request, rank.index if len(self.ranks) > 1 else None)
        self._begin(rank, request)
        self._calls[request.rid] = _Call(sink, rank, self._spawn(self._read(sent, request, sink, rank)))

    def abort(self, request_ids: list[str]) -> None:
        """Forget these requests and tell the engine; ids that have ended are skipped."""
        for rid in request_ids:
            call = self._forget(rid)
            if call is not None:
                call.task.cancel()
                self._spawn(self._tell_abort(rid))

    def end(self, request_ids: list[str]) -> None:
        """The same for requests whose text is complete: the protocol does not tell them apart."""
        self.abort(request_ids)

    def control(self, method: str, args: list[object]) -> asyncio.Future[list[wire.ControlReplySlim]]:
        """A call to the engine as a whole; the future gives one reply. Raises `LaneNotReady`."""
        self._check_ready()
        return asyncio.ensure_future(self._control(method, args))

    async def _control(self, method: str, args: list[object]) -> list[wire.ControlReplySlim]:
        try:
            reply = await self._call_of(method, args)
        except (TypeError, ValueError) as error:
            return [wire.ControlReplySlim(0, False, f"{method} over gRPC: {error}", 0)]
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise LaneNotReady(f"worker {self.url}: {error.details()}") from None
            return [wire.ControlReplySlim(0, False, error.details() or error.code().name, 0)]
        return [wire.ControlReplySlim(0, reply.success, reply.message, 0)]

    def _call_of(self, method: str, args: list[object]) -> Awaitable[Any]:
        """The call that the protocol has for it. TypeError, ValueError: what its message has no room for."""
        if method == "flush_cache":
            timeout_s = float(args[0]) if args and isinstance(args[0], (int, float)) else _CALL_S
            return self._stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s), timeout=timeout_s)
        if method == "start_profile":
            fields = args[0] if args and isinstance(args[0], dict) else {}
            return self._stub.StartProfile(common_pb2.StartProfileRequest(**fields), timeout=_CALL_S)
        if method == "stop_profile":
            return self._stub.StopProfile(common_pb2.StopProfileRequest(), timeout=_PROFILE_S)
        raise ValueError("there is no such call")

    async def _read(
        self,
        sent: pb.GenerateRequest,
        request: wire.PlainGenerateReqInput | wire.TokenizedGenerateReqInput,
        sink: RequestSink,
        rank: Rank,
    ) -> None:
        """One call from its first message to its end; the request is ended exactly once."""
        rid = request.rid
        traceparent = getattr(request, "traceparent", None)
        metadata = (("traceparent", traceparent),) if traceparent is not None else None
        try:
            async with asyncio.timeout(self._limits.request_timeout_s or None):
                async for response in self._stub.Generate(sent, metadata=metadata):
                    rank.last_output_s = self.last_output_s = time.monotonic()
                    batch = to_batch(response, rid, sent.stream, rank.index)
                    rank.on_rows(batch, rank.last_output_s)
                    if batch.finished_reasons[0]:
                        self._forget(rid)
                        sink.push(batch, 0)
                        return
                    sink.push(batch, 0)
        except TimeoutError:
            if self._forget(rid) is not None:
                sink.push(to_timeout(self._limits.request_timeout_s, rid, rank.index), 0)
                await self._tell_abort(rid)
            return
        except grpc.aio.AioRpcError as error:
            if self._forget(rid) is None:
                return
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                sink.fail(f"worker {self.url}: {error.details()}")
            else:
                sink.push(to_refusal(error, rid, rank.index), 0)
            return
        if self._forget(rid) is not None:
            self.dropped["cut_off"] += 1
            sink.fail(f"worker {self.url} ended an answer before its end")

    async def _tell_abort(self, rid: str) -> None:
        """Ended calls are aborted by engines of ours; others wait for this call."""
        try:
            await self._stub.Abort(pb.AbortRequest(request_id=rid, reason="Stream dropped"), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            logger.debug("worker %s: abort of %s: %s", self.url, rid, error.details())

    def _forget(self, rid: str) -> _Call | None:
        call = self._calls.pop(rid, None)
        if call is not None:
            call.rank.end()
        return call

    def follow_kv(self, cache: Cache) -> None:
        """Keep the caller's index of what the engine caches, until the engine is lost."""
        if self._following is not None:
            self._following.cancel()
        self._following = self._spawn(follow(self._stub, cache))

    # ---- the engine ------------------------------------------------------------------------------------------

    async def _live(self, channel: grpc.aio.Channel) -> None:
        """Connect, watch, and connect again, until cancelled."""
        limits = self._limits
        await asyncio.sleep(limits.startup_delay_s)
        begun_s = time.monotonic()
        while True:
            try:
                await self._register()
                await self._watch(channel)
            except grpc.aio.AioRpcError as error:
                self._lose(f"{error.code().name}: {error.details()}")
            except (ValueError, TypeError) as error:
                self._lose(f"what the engine says of itself cannot be read: {error}")
            if not self._was_ready and 0 < limits.startup_timeout_s < time.monotonic() - begun_s:
                self._set_state(LaneState.CLOSED, f"it did not register in {limits.startup_timeout_s:g} s")
                return
            await asyncio.sleep(_RETRY_S if self._was_ready else limits.startup_interval_s)

    async def _register(self) -> None:
        health = await self._stub.HealthCheck(pb.HealthCheckRequest(), timeout=_CALL_S)
        if not health.healthy:
            self._lose(f"the engine is not healthy: {health.message}")
            return
        model = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=_CALL_S)
        server = await self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=_CALL_S)
        response = to_ready(model, server)
        for index in range(response.data_parallel_size):
            rank = Rank(wire.identity_of(index))
            rank.response = response
            rank.total_blocks = response.num_gpu_blocks
            self.ranks[rank.identity] = rank
        self.last_output_s = self._checked_s = time.monotonic()
        self._was_ready = True
        self._num_failed = self._num_owed = 0
        self._set_state(LaneState.READY, f"{response.data_parallel_size} rank(s) answer")

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Loads and signs of life while the engine is there; returns or raises when it is not."""
        limits, loads_s = self._limits, 0.0
        pause_s = min(_WATCH_S, limits.load_interval_s or _WATCH_S, limits.health_interval_s or _WATCH_S)
        while self.state is LaneState.READY:
            await asyncio.sleep(pause_s)
            if channel.get_state() in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                self._lose("the connection is lost")
                return
            now_s = time.monotonic()
            if limits.load_interval_s and now_s - loads_s >= limits.load_interval_s:
                loads_s = now_s
                await self._take_loads()
            is_due = 0 < limits.health_interval_s <= now_s - self._checked_s
            is_due = is_due or any(rank.silence_s(now_s) > _SILENT_S for rank in self.ranks.values())
            if is_due and (self._checking is None or self._checking.done()):
                self._checked_s = now_s
                self._checking = self._spawn(self._check_health())

    async def _take_loads(self) -> None:
        self.num_polls += 1
        try:
            loads = await self._stub.GetLoads(pb.GetLoadsRequest(include=["core", "queues"]), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED):
                return
            raise
        told = {wire.identity_of(load.dp_rank) for load in loads.loads}
        self._gone = set(self.ranks) - told if told else set()
        for load in loads.loads:
            rank = self.ranks.get(wire.identity_of(load.dp_rank))
            if rank is not None:
                usage = load.active_token_usage if load.HasField("active_token_usage") else load.token_usage
                active_blocks = round(usage * rank.total_blocks)
                rank.on_load(time.monotonic(), load.num_running_reqs, load.num_waiting_reqs, active_blocks)
                rank.cache_hit_rate = load.cache_hit_rate

    async def _check_health(self) -> None:
        """An engine that finishes a step for this has finished one for all."""
        try:
            health = await self._stub.HealthCheck(pb.HealthCheckRequest(), timeout=self._limits.health_timeout_s)
            failure = "" if health.healthy else (health.message or "the engine is not healthy")
        except grpc.aio.AioRpcError as error:
            failure = f"{error.code().name}: {error.details()}"
        if self.state is not LaneState.READY:
            return
        self.num_checks["failure" if failure else "success"] += 1
        if failure:
            self._on_failure(failure)
            return
        self._num_failed = 0
        for rank in self.ranks.values():
            rank.last_output_s = time.monotonic()
        if self.is_sick:
            self._num_owed -= 1
            if not self._num_owed:
                self.is_sick = False
                self._on_state(self.state, "its health checks succeed again")

    def _on_failure(self, failure: str) -> None:
        """A worker that is sick keeps its requests and gets no new ones; it is not lost, only its connection can be."""
        self._num_failed += 1
        if self._limits.health_interval_s and self._num_failed >= self._limits.failures:
            self._num_owed = self._limits.successes
            if not self.is_sick:
                self.is_sick = True
                self._on_state(self.state, f"{self._num_failed} health checks failed in a row: {failure}")

    def _lose(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        self.ranks.clear()
        self.is_sick = False
        self._gone.clear()
        if self._following is not None:
            self._following.cancel()
            self._following = None
        for call in calls.values():
            call.task.cancel()
            call.sink.fail(f"worker {self.url}: {reason}")
        if self.state is LaneState.HANDSHAKE and reason != self._why:
            self._on_state(self.state, reason)  # why it still does not answer
        self._set_state(LaneState.HANDSHAKE, reason)
        self._why = reason

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _credentials(tls: GrpcTls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
