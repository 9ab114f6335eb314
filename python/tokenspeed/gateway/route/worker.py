# SPDX-License-Identifier: MIT
"""One worker as the router sees it: a lane, its state, and whether it makes progress.

A worker is READY when all its ranks have registered, STALLED when one of them has had work for longer than
`stall_s` without saying anything (an engine's loop says something after every step, also when no request got a
token) or when its health checks fail, DRAINING when it is being removed, and ABSENT when it has not dialled yet or
was lost. From that it comes back by itself when its engine dials again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import zmq

from tokenspeed.config.gateway_routing import OverloadConfig
from tokenspeed.config.gateway_workers import over_grpc
from tokenspeed.gateway.route.breaker import Breaker, BreakerOptions, BreakerState
from tokenspeed.gateway.route.kv_feed import KvFeed
from tokenspeed.gateway.route.kv_index import WorkerBlocks
from tokenspeed.rpc.lane.address import split_tcp
from tokenspeed.rpc.lane.base import LaneOptions, LaneState, RequestSink
from tokenspeed.rpc.lane.gateway_end import GatewayLane
from tokenspeed.rpc.lane.rank import Rank
from tokenspeed.rpc.lane.wire import (
    ControlReplySlim,
    PlainGenerateReqInput,
    ReadyResponse,
    TokenizedGenerateReqInput,
)

logger = logging.getLogger(__name__)
_SAID = {LaneState.CLOSED: "is closed", LaneState.HANDSHAKE: "waits for an engine", LaneState.READY: "is ready"}

_LOAD_IS_OLD_S = 5.0
_LONGEST_PREFILL_S = 120.0


class WorkerState(enum.Enum):
    """What a worker can do now."""

    ABSENT = "absent"
    READY = "ready"
    STALLED = "stalled"
    DRAINING = "draining"


@dataclass(frozen=True)
class WorkerOptions:
    """What all workers have in common."""

    lane: LaneOptions
    stall_s: float
    breaker: BreakerOptions
    silent_s: float = 2.0
    """After this long without a sign of life while it has work, a worker is avoided; `stall_s` is when it is stuck."""
    wedged_s: float = 3.0
    """After this long without a token while requests pile up, too."""
    tokens_per_s: float = 2000.0
    """By which the time is guessed that prompts in flight may need before their first token."""
    overload: OverloadConfig | None = None
    """None: what engines say of their load is not looked at."""
    private: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Where this gateway is one of several: worker URL to the (URL, handshake address) of its own lane for it."""

    @property
    def sheds(self) -> bool:
        """Whether requests are turned away where all workers are overloaded."""
        return self.overload is not None and self.overload.sheds

    def lane_of(self, url: str) -> tuple[str, LaneOptions]:
        """The lane to bind for a worker: its URL and options."""
        if url not in self.private:
            return url, self.lane
        own, handshake = self.private[url]
        return own, replace(self.lane, engine_count=None, handshake_address=handshake, curve=None)


class Watcher(Protocol):
    """Hears of what happens to workers, at once."""

    def health(self, worker: Worker) -> None:
        """A worker became ready or was lost."""

    def breaker(self, worker: Worker, old: BreakerState, new: BreakerState) -> None:
        """A worker's breaker went from one state to another."""


class Lane(Protocol):
    """What a worker needs of the way to its engine; `GatewayLane` says what each of these does."""

    state: LaneState
    ranks: dict[bytes, Rank]
    is_sick: bool
    num_checks: Counter[str]
    num_polls: int

    @property
    def num_in_flight(self) -> int: ...
    @property
    def ready_response(self) -> ReadyResponse: ...
    def open(self) -> None: ...
    def close(self) -> None: ...
    def submit(self, request: PlainGenerateReqInput | TokenizedGenerateReqInput, sink: RequestSink) -> None: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def end(self, request_ids: list[str]) -> None: ...
    def control(self, method: str, args: list[object]) -> asyncio.Future[list[ControlReplySlim]]: ...


class EventLane(Lane, Protocol):
    """A lane that brings KV events itself."""

    def follow_kv(self, cache: WorkerBlocks) -> None: ...


def connection_mode(url: str) -> str:
    """How the worker of a URL is reached: grpc or zmq."""
    return "grpc" if over_grpc(url) else "zmq"


def _make_lane(url: str, options: LaneOptions, on_state: Callable[[LaneState, str], None]) -> GatewayLane | EventLane:
    if connection_mode(url) == "zmq":
        return GatewayLane(url, options, on_state)
    # Loaded when needed: most gateways never speak gRPC.
    from tokenspeed.rpc.grpc.call.client import GrpcLane

    return GrpcLane(url, options, on_state)


class Worker:
    """A worker URL and everything known of what stands behind it."""

    def __init__(self, url: str, options: WorkerOptions, watcher: Watcher) -> None:
        self.url = url
        self.reason = "not opened yet"
        """Why the worker is in its state, in words."""
        self.draining = False
        """It is being removed: it finishes what it has."""
        self.priority = 0
        """Workers of a higher one are asked first."""
        self.id = str(uuid.uuid5(uuid.NAMESPACE_URL, url))
        """The same for a URL on every gateway, and after a restart."""
        self.blocks = WorkerBlocks()
        self.feed: KvFeed | None = None
        """Subscribes to KV events over ZMQ."""
        self.ready_s = 0.0
        """When its engine came, in `time.monotonic()` seconds."""
        self.num_pending = 0
        """Requests of ours that have had no token yet."""
        self.num_pending_tokens = 0
        """Tokens of their prompts, less those that the worker is thought to hold where that is credited."""
        self._options = options
        self._stall_s = options.stall_s
        self._load_is_old_s = max(_LOAD_IS_OLD_S, 2 * options.lane.grpc.load_interval_s)
        self._watcher = watcher
        self.lane = _make_lane(*options.lane_of(url), self._lane_changed)
        self.breaker = Breaker(options.breaker, time.monotonic, self._breaker_changed)

    @property
    def connection_mode(self) -> str:
        """zmq or grpc."""
        return connection_mode(self.url)

    @property
    def num_in_flight(self) -> int:
        """Requests that the worker has not finished."""
        return self.lane.num_in_flight

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engine, by its last word."""
        return sum(rank.num_waiting for rank in self.lane.ranks.values())

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that running requests hold, the mean of the ranks that told it lately."""
        since_s = time.monotonic() - self._load_is_old_s
        told = [rank for rank in self.lane.ranks.values() if rank.load_s >= since_s]
        return sum(rank.active_blocks / max(1, rank.total_blocks) for rank in told) / max(1, len(told))

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the worker gave in a second, lately."""
        return sum(rank.tokens_per_s for rank in self.lane.ranks.values())

    def begin_prefill(self, num_tokens: int) -> None:
        """A request was sent whose prompt has so many tokens to compute."""
        self.num_pending += 1
        self.num_pending_tokens += num_tokens

    def end_prefill(self, num_tokens: int) -> None:
        """It has had its first token, or is over."""
        self.num_pending -= 1
        self.num_pending_tokens -= num_tokens

    @property
    def is_wedged(self) -> bool:
        """Whether some rank has given nothing for longer than the prompts in flight may need, and requests pile up."""
        options = self._options
        needed_s = min(_LONGEST_PREFILL_S, self.num_pending_tokens / options.tokens_per_s)
        now_s, bound_s = time.monotonic(), max(options.wedged_s, needed_s)
        return any(rank.is_wedged(now_s, bound_s) for rank in self.lane.ranks.values())

    @property
    def is_silent(self) -> bool:
        """Whether the worker has work and has said nothing for so long that others are asked before it."""
        return self.silence_s() > self._options.silent_s

    @property
    def is_overloaded(self) -> bool:
        """Whether each of its ranks says that it has more than it should. What was said long ago counts no more: an
        engine without work says nothing."""
        limits = self._options.overload
        since_s = time.monotonic() - self._load_is_old_s
        return limits is not None and all(
            rank.load_s >= since_s
            and (
                rank.num_waiting >= limits.waiting_requests
                or rank.active_blocks >= limits.token_usage * max(1, rank.total_blocks)
            )
            for rank in self.lane.ranks.values()
        )

    def follow_kv(self) -> None:
        """Learn what the engine caches, if it publishes that; the lane is ready."""
        self.leave_kv()
        if isinstance(self.lane, GatewayLane):
            declared = self.lane.ready_response.kv_events_config
            if declared is None or not KvFeed.wanted(declared):
                return
            host = "127.0.0.1" if self.lane.url.startswith("ipc://") else split_tcp(self.url)[0]
            ranks = [rank.index for rank in self.lane.ranks.values()]
            try:
                self.feed = KvFeed(host, declared, ranks, self.blocks)
                self.blocks.followed = True
            except (ValueError, zmq.ZMQError) as error:
                logger.warning("worker %s: its KV events cannot be followed: %s", self.url, error)
        else:
            self.lane.follow_kv(self.blocks)
            self.blocks.followed = True

    def leave_kv(self) -> None:
        """What is known of the cache is known no more."""
        if self.feed is not None:
            self.feed.close()
            self.feed = None
        self.blocks.forget()

    @property
    def model(self) -> str | None:
        """The name under which the worker's engine serves its model; None while there is no engine."""
        return self.lane.ready_response.instance_id if self.lane.state is LaneState.READY else None

    def state(self, now_s: float | None = None) -> WorkerState:
        """The state at `now_s` (`time.monotonic()`; None: now)."""
        if self.lane.state is not LaneState.READY:
            return WorkerState.ABSENT
        if self.draining:
            return WorkerState.DRAINING
        if self.lane.is_sick:
            return WorkerState.STALLED
        return WorkerState.STALLED if self.silence_s(now_s) > self._stall_s else WorkerState.READY

    def silence_s(self, now_s: float | None = None) -> float:
        """For how long some rank with work has said nothing."""
        now_s = time.monotonic() if now_s is None else now_s
        return max((rank.silence_s(now_s) for rank in self.lane.ranks.values()), default=0.0)

    def _lane_changed(self, state: LaneState, reason: str) -> None:
        self.reason = reason
        is_ready = state is LaneState.READY
        if is_ready and not self._was_ready:
            self.ready_s = time.monotonic()
        log = logger.warning if self._was_ready and (not is_ready or self.lane.is_sick) else logger.info
        log("worker %s %s: %s", self.url, "is unhealthy" if is_ready and self.lane.is_sick else _SAID[state], reason)
        self._was_ready = is_ready
        self._watcher.health(self)

    def _breaker_changed(self, old: BreakerState, new: BreakerState) -> None:
        log = logger.warning if new is BreakerState.OPEN else logger.info
        log("worker %s: its circuit breaker is %s", self.url, new.name.lower())
        self._watcher.breaker(self, old, new)

    _was_ready = False
