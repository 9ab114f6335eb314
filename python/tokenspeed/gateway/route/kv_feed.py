# SPDX-License-Identifier: MIT
"""Subscribes to the KV events that the ranks of a worker publish over ZMQ, and keeps their indexes true.

Batches are numbered. At the start, and where a number is missing, the engine's replay socket is asked for what it
keeps; what arrives meanwhile waits. Where nothing can be replayed, what is known is dropped: an index that lacks a
removal would promise what is not there. Lives on the loop's thread; never waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from tokenspeed.config.flags import FlagError
from tokenspeed.config.kv_events import KvEventsConfig, rank_endpoint
from tokenspeed.gateway.route.kv_index import KvIndex, WorkerBlocks
from tokenspeed.observability.kv_events import END_OF_REPLAY, decode_sequence, encode_sequence
from tokenspeed.rpc.lane.sockets import descriptor, readable

logger = logging.getLogger(__name__)

_REPLAY_S = 5.0
_BATCHES_PER_TURN = 64
_ANYWHERE = ("*", "0.0.0.0", "[::]")


class KvFeed:
    """All ranks of one worker. `host`: where to dial endpoints that are bound on every address. Raises ValueError for
    a configuration that cannot be followed."""

    def __init__(self, host: str, declared: dict[str, Any], ranks: Sequence[int], blocks: WorkerBlocks) -> None:
        names = KvEventsConfig.__struct_fields__
        try:
            config = msgspec.convert({key: declared[key] for key in names if key in declared}, KvEventsConfig)
            places = [(_reachable(host, config.endpoint, rank), _replay(host, config, rank), rank) for rank in ranks]
        except (msgspec.ValidationError, FlagError) as error:
            raise ValueError(str(error)) from None
        self.counts = blocks.counts
        self._context = zmq.Context()
        self._ranks = [_RankFeed(self, self._context, place, config.topic, blocks) for place in places]

    @staticmethod
    def wanted(declared: dict[str, Any] | None) -> bool:
        """Whether an engine that declares this publishes anything."""
        return bool(declared and declared.get("enable_kv_cache_events") and declared.get("publisher") == "zmq")

    def close(self) -> None:
        """Leave the engine."""
        for rank in self._ranks:
            rank.close()
        self._context.destroy(linger=0)


def _reachable(host: str, endpoint: str, rank: int) -> str:
    scheme, _, rest = rank_endpoint(endpoint, rank).partition("://")
    bound, colon, port = rest.rpartition(":")
    return f"{scheme}://{host}:{port}" if colon and bound in _ANYWHERE else f"{scheme}://{rest}"


def _replay(host: str, config: KvEventsConfig, rank: int) -> str | None:
    return None if config.replay_endpoint is None else _reachable(host, config.replay_endpoint, rank)


_Place = tuple[str, str | None, int]
"""Where a rank publishes, where it replays, and its number."""


class _RankFeed:
    def __init__(self, feed: KvFeed, context: zmq.Context[Any], place: _Place, topic: str, known: WorkerBlocks) -> None:
        endpoint, replay, rank = place
        self._feed, self._blocks = feed, known
        self._index: KvIndex = known.of_rank(rank)
        self._loop = asyncio.get_running_loop()
        self._next: int | None = None
        self._held: list[tuple[int, bytes]] | None = None
        """Batches that wait for the end of a replay; None: there is none."""
        self._timer: asyncio.TimerHandle | None = None
        self._subscriber = context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.RCVHWM, 0)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._subscriber.connect(endpoint)
        self._replayer: zmq.Socket[bytes] | None = None
        if replay is not None:
            self._replayer = context.socket(zmq.DEALER)
            self._replayer.connect(replay)
            self._watch(self._replayer)
            self._ask(0)
        self._watch(self._subscriber)
        feed.counts["subscriptions"] += 1

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for socket in (self._subscriber, self._replayer):
            if socket is not None and not socket.closed:
                self._loop.remove_reader(descriptor(socket))
                socket.close(linger=0)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._loop.add_reader(descriptor(socket), self._drain, socket)
        self._loop.call_soon(self._drain, socket)

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        # The descriptor signals edges: every turn reads until nothing is left, or comes back.
        for _ in range(_BATCHES_PER_TURN):
            if socket.closed or not readable(socket):
                return
            frames = socket.recv_multipart(zmq.NOBLOCK)
            try:
                sequence, payload = decode_sequence(frames[-2]), frames[-1]
                if socket is self._replayer:
                    self._on_replayed(sequence, payload)
                else:
                    self._on_published(sequence, payload)
            except (ValueError, IndexError, TypeError, msgspec.DecodeError) as error:
                self._feed.counts["unreadable"] += 1
                logger.warning("dropped a batch of KV events that cannot be read: %s", error)
        self._loop.call_soon(self._drain, socket)

    def _on_published(self, sequence: int, payload: bytes) -> None:
        if self._held is not None:
            self._held.append((sequence, payload))
        elif self._next is None or sequence == self._next:
            self._apply(sequence, payload)
        elif sequence > self._next:
            if self._replayer is None:
                self._feed.counts["gaps:unrecovered_cleared"] += 1
                self._apply(sequence, payload)
            else:
                self._feed.counts["gaps:replay_requested"] += 1
                self._ask(self._next)
                self._on_published(sequence, payload)

    def _ask(self, first: int) -> None:
        assert self._replayer is not None
        self._held = []
        self._replayer.send_multipart([b"", encode_sequence(first)])
        self._timer = self._loop.call_later(_REPLAY_S, self._end_replay)

    def _on_replayed(self, sequence: int, payload: bytes) -> None:
        if self._held is None:
            return  # it came too late
        if sequence == END_OF_REPLAY:
            self._end_replay()
        elif self._next is None or sequence >= self._next:
            self._apply(sequence, payload)

    def _end_replay(self) -> None:
        """Take what has waited, with or without all that was asked for."""
        if self._timer is not None:
            self._timer.cancel()
        held, self._held = self._held or [], None
        for sequence, payload in held:
            if self._next is None or sequence >= self._next:
                self._apply(sequence, payload)

    def _start_over(self) -> None:
        self._feed.counts["resyncs:gap_cleared"] += 1
        self._index.clear()

    def _apply(self, sequence: int, payload: bytes) -> None:
        if self._next is not None and sequence > self._next:
            self._feed.counts["missed"] += sequence - self._next
            self._start_over()  # what lies between is kept no more
        self._next = sequence + 1
        self._feed.counts["batches"] += 1
        for event in msgspec.msgpack.decode(payload)[1]:
            self._take(event)
        self._blocks.known = True

    def _take(self, event: list[Any]) -> None:
        match event:
            case ["BlockStored", hashes, parent, tokens, size, *more]:
                medium = more[1] if len(more) > 1 else None
                for number, block_hash in enumerate(hashes):
                    self._index.store(block_hash, parent, tokens[number * size : (number + 1) * size], medium)
                    parent = block_hash
            case ["BlockRemoved", hashes, *more]:
                for block_hash in hashes:
                    self._index.remove(block_hash, more[0] if more else None)
            case ["AllBlocksCleared", *_]:
                self._index.clear()
            case _:
                raise ValueError(f"an event {event[:1]} is not known")
