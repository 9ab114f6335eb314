# SPDX-License-Identifier: MIT
"""Publishes what changes in the prefix cache over ZMQ: a thread of its own encodes, sends and replays.

`take` listens to a `KvFeed` on the loop's thread and never waits: with a full queue a batch is lost, and its number
with it, so that subscribers see the gap. The sockets belong to the publisher's thread. A PUB socket drops what a slow
subscriber does not take (`hwm`); who missed something asks the ROUTER for a replay.
"""

from __future__ import annotations

import logging
import queue
import threading

import zmq

import tokenspeed_cc
from tokenspeed.config.flags import FlagError
from tokenspeed.config.kv_events import KvEventsConfig
from tokenspeed.engine.kv_feed import CacheChange, KvBatch
from tokenspeed.observability import kv_events

logger = logging.getLogger("tokenspeed.engine")

_REPLAY_POLL_S = 0.05
_LINGER_MS = 200
_MEDIA = {"device": None, "host": kv_events.HOST_MEDIUM}


class KvPublisher:
    """Publishes from construction to `close`. Raises FlagError for an address that cannot be bound."""

    def __init__(self, config: KvEventsConfig, dp_rank: int, block_size: int) -> None:
        self._dp_rank = dp_rank
        self._block_size = block_size
        self._log = kv_events.EventLog(config.topic.encode(), config.buffer_steps)
        self._queue: queue.Queue[KvBatch | None] = queue.Queue(config.max_queue_size)
        self._context = zmq.Context()
        self._publisher = self._bound(zmq.PUB, config.endpoint, config.hwm)
        self._replayer = None
        if config.replay_endpoint is not None:
            self._replayer = self._bound(zmq.ROUTER, config.replay_endpoint, 0)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        logger.info("KV events at %s", config.endpoint)

    def take(self, batch: KvBatch) -> None:
        """Hand a batch to the publisher's thread."""
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            logger.warning("KV events batch %d is lost: %d are waiting", batch.sequence, self._queue.maxsize)

    def close(self) -> None:
        """Send what was taken and end; no batch comes any more. May be called twice."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            self._context.destroy(linger=_LINGER_MS)

    def _bound(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise FlagError("--kv-events-config", f"{endpoint}: {error.strerror}") from None
        return socket

    def _run(self) -> None:
        while True:
            try:
                batch = self._queue.get(timeout=None if self._replayer is None else _REPLAY_POLL_S)
                if batch is None:
                    return
                self._publisher.send_multipart(self._log.publish(batch.sequence, self._encoded(batch)))
            except queue.Empty:
                pass
            self._answer_replays()

    def _encoded(self, batch: KvBatch) -> bytes:
        events = [event_of(change, self._block_size) for change in batch.changes]
        return kv_events.encode_batch(batch.timestamp_s, events, self._dp_rank)

    def _answer_replays(self) -> None:
        """A request is the first number wanted, behind an empty frame where a REQ socket asks."""
        while self._replayer is not None and self._replayer.poll(0):
            *route, wanted = self._replayer.recv_multipart()
            try:
                start = kv_events.decode_sequence(wanted)
            except ValueError as error:
                logger.warning("dropped a replay request that cannot be read: %s", error)
                continue
            for frames in self._log.replay(start):
                self._replayer.send_multipart([*route, *frames])


def event_of(change: CacheChange, block_size: int) -> kv_events.KvEvent:
    """A change as other programs read it."""
    if isinstance(change, tokenspeed_cc.AllBlocksCleared):
        return kv_events.AllBlocksCleared()
    own_hash = kv_events.signed(change.block_hash)
    if isinstance(change, tokenspeed_cc.BlockRemoved):
        return kv_events.BlockRemoved(own_hash, _MEDIA[change.medium])
    parent = None if change.parent_hash is None else kv_events.signed(change.parent_hash)
    return kv_events.BlockStored(own_hash, parent, change.token_ids, block_size, _MEDIA[change.medium])
