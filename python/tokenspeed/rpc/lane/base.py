# SPDX-License-Identifier: MIT
"""What every way to a worker has in common, over ZMQ or gRPC: its states, its ranks, and which of them is next."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tokenspeed.config.curve import GatewayCurve
from tokenspeed.config.gateway_workers import GrpcConfig
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.rank import Rank


class LaneState(enum.Enum):
    """Where a lane is; requests are accepted in READY only."""

    CLOSED = "closed"
    HANDSHAKE = "handshake"
    READY = "ready"


class LaneNotReady(ConnectionError):
    """No engine is registered; the request was not sent."""


class NoSuchRank(ValueError):
    """A request names a data-parallel rank that its worker does not have. It was not sent."""


class RequestSink(Protocol):
    """Who reads the results of one request. Called on the loop's thread; must not block or raise."""

    def push(self, batch: wire.BatchTokenIDOutSlim, row: int) -> None:
        """Row `row` of `batch` belongs to this request; the last one has a finish reason."""

    def fail(self, reason: str) -> None:
        """The engine is gone; nothing more will come."""


@dataclass(frozen=True)
class LaneOptions:
    """How a lane is bound. `engine_count` None: as many ranks as the first HELLO says (1 when it says nothing)."""

    engine_count: int | None
    handshake_address: str | None
    startup_timeout_s: float
    curve: GatewayCurve | None = None
    """None for a lane without encryption."""
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    by_tokens: bool = False
    """Of several ranks the one that holds the fewest tokens is next, not the one with the fewest requests."""


class Lane:
    """`on_state` is called after every change of state with a sentence that says why."""

    def __init__(self, url: str, options: LaneOptions, on_state: Callable[[LaneState, str], None]) -> None:
        self.url = url
        self.state = LaneState.CLOSED
        self.ranks: dict[bytes, Rank] = {}
        self.dropped: Counter[str] = Counter()
        """Frames that could not be read or belonged to nobody, by cause."""
        self.last_output_s = 0.0
        """`time.monotonic()` of the last frame from any rank."""
        self.is_sick = False
        """Its engine is there and says, time and again, that it is not well: it should get no new requests."""
        self.num_checks: Counter[str] = Counter()
        """Health checks by result, success or failure, since somebody looked."""
        self.num_polls = 0
        """Times that the engine was asked for its load, since then."""
        self._gone: set[bytes] = set()
        """Ranks that an engine has lost and serves on without."""
        self._options = options
        self._on_state = on_state

    @property
    def ready_response(self) -> wire.ReadyResponse:
        """What the first rank said about itself. Raises `LaneNotReady` before it has."""
        self._check_ready()
        response = next(iter(self.ranks.values())).response
        assert response is not None  # READY means that every rank has registered
        return response

    def _check_ready(self) -> None:
        if self.state is not LaneState.READY:
            raise LaneNotReady(f"worker {self.url} has no engine")

    def _next_rank(self, rid: str, is_known: bool, named: int | None = None) -> Rank:
        """The rank for a request: the one that it names, by its place among them, or the one with the least to do.
        Raises `LaneNotReady`, `NoSuchRank`, and `ValueError` for an id that is in flight (`is_known`)."""
        self._check_ready()
        if is_known:
            raise ValueError(f"request id {rid!r} is in flight already")
        if named is not None:
            if not 0 <= named < len(self.ranks):
                raise NoSuchRank(f"data_parallel_rank must be in [0, {len(self.ranks) - 1}], got {named}")
            return sorted(self.ranks.values(), key=lambda rank: rank.index)[named]
        ranks = [rank for rank in self.ranks.values() if rank.identity not in self._gone] or list(self.ranks.values())
        if self._options.by_tokens:
            return min(ranks, key=lambda rank: (rank.num_tokens, rank.num_in_flight, rank.num_sent))
        return min(ranks, key=lambda rank: (rank.num_in_flight, rank.num_sent))

    @staticmethod
    def _named_rank(request: wire.PlainGenerateReqInput | wire.TokenizedGenerateReqInput) -> int | None:
        return request.data_parallel_rank if isinstance(request, wire.TokenizedGenerateReqInput) else None

    def _begin(self, rank: Rank, request: wire.PlainGenerateReqInput | wire.TokenizedGenerateReqInput) -> None:
        """The request goes to this rank."""
        rank.begin(time.monotonic(), len(request.input_ids))

    def _set_state(self, state: LaneState, reason: str) -> None:
        if state is not self.state:
            self.state = state
            self._on_state(state, reason)
