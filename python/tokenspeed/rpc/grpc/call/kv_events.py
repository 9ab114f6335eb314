# SPDX-License-Identifier: MIT
"""Follows `SubscribeKvEvents` of one engine into the caller's index, until cancelled. On the loop's thread."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from tokenspeed_protos import common_pb2
from tokenspeed_protos.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_LOST = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS)


class Blocks(Protocol):
    """One rank's blocks as the caller keeps them."""

    def store(self, block_hash: int, parent: int | None, tokens: Sequence[int], medium: str | None) -> None: ...
    def remove(self, block_hash: int, medium: str | None) -> None: ...
    def clear(self) -> None: ...


class Cache(Protocol):
    """All ranks' blocks as the caller keeps them."""

    counts: Counter[str]
    """What became of events: batches, subscriptions, missed, resyncs:REASON."""

    def of_rank(self, rank: int) -> Blocks: ...

    def was_told(self) -> None:
        """A batch with events came."""

    def was_refused(self) -> None:
        """The engine publishes no events."""


async def follow(stub: TokenSpeedSchedulerStub, cache: Cache) -> None:
    """Returns when the engine publishes none at all."""
    of_rank = cache.of_rank
    wanted, ranks = 0, set[int]()
    while True:
        request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=wanted)
        cache.counts["subscriptions"] += 1
        try:
            async for batch in stub.SubscribeKvEvents(request):
                if batch.HasField("load") and batch.load.load_only:
                    continue
                cache.counts["batches"] += 1
                if wanted and batch.sequence_number > wanted:
                    cache.counts["missed"] += batch.sequence_number - wanted
                    cache.counts["resyncs:gap_cleared"] += 1
                    _clear(of_rank, ranks)
                ranks.add(batch.dp_rank)
                if batch.HasField("snapshot") and not batch.snapshot.index:
                    of_rank(batch.dp_rank).clear()
                for event in batch.events:
                    _take(of_rank(batch.dp_rank), event)
                wanted = batch.sequence_number + 1
                cache.was_told()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                cache.was_refused()
                return
            if error.code() in _LOST:
                cache.counts[f"resyncs:{error.code().name.lower()}"] += 1
                _clear(of_rank, ranks)
                wanted = 0
            logger.debug("the stream of KV events ended: %s", error.details())
        await asyncio.sleep(_RETRY_S)


def _clear(of_rank: Callable[[int], Blocks], ranks: set[int]) -> None:
    """Batches are lost, removals perhaps among them: nothing is known any more."""
    for rank in ranks:
        of_rank(rank).clear()


def _take(blocks: Blocks, event: common_pb2.KvCacheEvent) -> None:
    kind = event.WhichOneof("data")
    if kind == "stored":
        parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
        for block in event.stored.blocks:
            blocks.store(block.block_hash, parent, block.token_ids, _medium(event.stored))
            parent = block.block_hash
    elif kind == "removed":
        for block_hash in event.removed.block_hashes:
            blocks.remove(block_hash, _medium(event.removed))
    elif kind == "cleared":
        blocks.clear()


def _medium(event: common_pb2.KvBlocksStored | common_pb2.KvBlocksRemoved) -> str | None:
    """The tier's name; a tier that is not told is the device's."""
    if not event.HasField("tier") or event.tier == common_pb2.KV_CACHE_TIER_DEVICE:
        return None
    return str(common_pb2.KvCacheTier.Name(event.tier))
