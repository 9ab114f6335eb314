# SPDX-License-Identifier: MIT
"""The index of a worker against a publisher of KV events: start, gaps, replays, restarts of numbers, garbage."""

from __future__ import annotations

import asyncio
import tempfile
from array import array
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import zmq

from tokenspeed.gateway.route.kv_feed import KvFeed
from tokenspeed.gateway.route.kv_index import WorkerBlocks
from tokenspeed.observability.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventLog,
    KvEvent,
    decode_sequence,
    encode_batch,
)

PROMPT = array("I", [1, 2, 3, 4])
FIRST = BlockStored(10, None, [1, 2], 2, None)
SECOND = BlockStored(11, 10, [3, 4], 2, None)


class Publisher:
    """What an engine's publisher does, step by step. `buffer_steps`: batches that can be replayed."""

    def __init__(self, replays: bool, buffer_steps: int = 100) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kv")
        self._context = zmq.Context()
        self._log = EventLog(b"", buffer_steps)
        self._number = -1
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.bind(f"ipc://{self._folder.name}/pub")
        self.config: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{self._folder.name}/pub",
            "replay_endpoint": None,
        }
        self._replayer = self._context.socket(zmq.ROUTER)
        if replays:
            self.config["replay_endpoint"] = f"ipc://{self._folder.name}/replay"
            self._replayer.bind(self.config["replay_endpoint"])

    def publish(self, *events: KvEvent, loses: bool = False) -> None:
        """The next batch; one that is lost does not leave."""
        self._number += 1
        frames = self._log.publish(self._number, encode_batch(0.0, events, 0))
        if not loses:
            self._publisher.send_multipart(frames)

    def garbage(self) -> None:
        """Something that is no batch."""
        self._publisher.send_multipart([b"", b"123", b"\xff"])

    def answer(self) -> None:
        """Serve the requests for a replay that have come."""
        while self._replayer.poll(0):
            *route, wanted = self._replayer.recv_multipart()
            for frames in self._log.replay(decode_sequence(wanted)):
                self._replayer.send_multipart([*route, *frames])

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._folder.cleanup()


@pytest.fixture(params=[True, False], ids=["replays", "no replays"])
def publisher(request: pytest.FixtureRequest) -> Iterator[Publisher]:
    publisher = Publisher(request.param)
    yield publisher
    publisher.close()


def following(publisher: Publisher, story: Callable[[WorkerBlocks, KvFeed], Awaitable[None]]) -> None:
    async def run() -> None:
        blocks = WorkerBlocks()
        feed = KvFeed("127.0.0.1", publisher.config, [0], blocks)
        try:
            # A subscription takes effect a moment after it is made.
            other = BlockStored(1, None, [7, 7], 2, None)
            await until(publisher, lambda: blocks.known, lambda: publisher.publish(other))
            await story(blocks, feed)
        finally:
            feed.close()

    asyncio.run(run())


async def until(publisher: Publisher, holds: Callable[[], bool], again: Callable[[], None] = lambda: None) -> None:
    for _ in range(1000):
        publisher.answer()
        if holds():
            return
        again()
        await asyncio.sleep(0.01)
    raise TimeoutError


def test_what_is_published_is_known_and_what_is_removed_is_not(publisher: Publisher) -> None:
    async def story(blocks: WorkerBlocks, feed: KvFeed) -> None:
        publisher.publish(FIRST, SECOND)
        await until(publisher, lambda: blocks.match(PROMPT) == 4)
        publisher.garbage()
        publisher.publish(BlockRemoved(11, None))
        await until(publisher, lambda: blocks.match(PROMPT) == 2)
        assert feed.counts["unreadable"] == 1
        publisher.publish(AllBlocksCleared())
        await until(publisher, lambda: blocks.match(PROMPT) == 0)

    following(publisher, story)


def test_a_gap_is_replayed_or_what_was_known_is_dropped(publisher: Publisher) -> None:
    async def story(blocks: WorkerBlocks, feed: KvFeed) -> None:
        publisher.publish(FIRST)
        await until(publisher, lambda: blocks.match(PROMPT) == 2)
        publisher.publish(SECOND, loses=True)
        publisher.publish(BlockStored(12, 11, [5, 6], 2, None))
        replays = publisher.config["replay_endpoint"] is not None
        await until(publisher, lambda: blocks.match(PROMPT) == (4 if replays else 0))
        assert feed.counts["gaps:replay_requested" if replays else "gaps:unrecovered_cleared"] == 1
        assert feed.counts["resyncs:gap_cleared"] == (0 if replays else 1)

    following(publisher, story)


def test_a_subscriber_that_comes_late_learns_what_was_there_before() -> None:
    publisher = Publisher(replays=True)
    publisher.publish(FIRST, SECOND)

    async def story(blocks: WorkerBlocks, feed: KvFeed) -> None:
        await until(publisher, lambda: blocks.match(PROMPT) == 4)

    following(publisher, story)
    publisher.close()


def test_batches_that_are_kept_no_more_empty_the_index() -> None:
    publisher = Publisher(replays=True, buffer_steps=2)

    async def story(blocks: WorkerBlocks, feed: KvFeed) -> None:
        publisher.publish(FIRST)
        await until(publisher, lambda: blocks.match(PROMPT) == 2)
        for number in range(4):
            publisher.publish(BlockStored(20 + number, None, [number, 8], 2, None), loses=True)
        publisher.publish(BlockStored(30, None, [6, 6], 2, None))
        await until(
            publisher, lambda: feed.counts["resyncs:gap_cleared"] == 1 and blocks.match(array("I", [6, 6])) == 2
        )
        assert blocks.match(PROMPT) == 0

    following(publisher, story)
    publisher.close()


def test_ranks_have_ports_of_their_own_and_open_hosts_are_replaced() -> None:
    with pytest.raises(ValueError, match="no port"):
        KvFeed("127.0.0.1", {"endpoint": "tcp://*", "publisher": "zmq"}, [0], WorkerBlocks())
    assert KvFeed.wanted({"enable_kv_cache_events": True, "publisher": "zmq"})
    assert not KvFeed.wanted({"enable_kv_cache_events": False, "publisher": "zmq"})
    assert not KvFeed.wanted(None)
