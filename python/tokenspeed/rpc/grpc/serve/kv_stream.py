# SPDX-License-Identifier: MIT
"""`SubscribeKvEvents`: the engine's `KvFeed` as a gRPC stream, with a record of the load behind each batch and each
second.

A subscriber gets what is kept from the number that it names on, then every batch as it comes; a batch that it wanted
and that is kept no more ends the stream with OUT_OF_RANGE, and it starts afresh.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import tokenspeed_cc
from tokenspeed.engine.kv_feed import CacheChange, KvBatch, KvFeed
from tokenspeed.observability.kv_events import signed
from tokenspeed.rpc.grpc.serve.info import EngineInfo
from tokenspeed_protos import common_pb2

LOAD_INTERVAL_S = 1.0
_TIERS = {"device": common_pb2.KV_CACHE_TIER_DEVICE, "host": common_pb2.KV_CACHE_TIER_HOST}


class BatchesLost(Exception):
    """Batches that the subscriber asked for are kept no more."""


async def kv_stream(
    feed: KvFeed, info: EngineInfo, start: int, loads_first: bool
) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
    """start: the first number wanted, from 1; 0: whatever is kept. loads_first: whether the load may come before any
    batch. Raises BatchesLost. Ends when it is closed."""
    event_loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[KvBatch] = asyncio.Queue()

    def listen(batch: KvBatch) -> None:
        event_loop.call_soon_threadsafe(arrived.put_nowait, batch)

    kept = feed.subscribe(listen)
    try:
        first, last = (number_of(kept[0]), number_of(kept[-1])) if kept else (1, 0)
        if start and not first <= start <= last + 1:
            raise BatchesLost(f"batch {start} is not kept; there are {first} to {last}")
        number, sample, has_begun = last, 0, loads_first
        for batch in kept:
            if number_of(batch) >= start:
                has_begun = True
                yield to_proto(batch, feed.block_size)
        while True:
            if has_begun:
                sample += 1
                load = info.load_record(sample, load_only=True)
                yield common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time(), dp_rank=0, load=load)
            try:
                batch = await asyncio.wait_for(arrived.get(), LOAD_INTERVAL_S)
            except TimeoutError:
                continue
            number, has_begun = number_of(batch), True
            yield to_proto(batch, feed.block_size)
    finally:
        feed.unsubscribe(listen)


def number_of(batch: KvBatch) -> int:
    """Numbers start at 1 here, so that 0 can mean "none yet"."""
    return batch.sequence + 1


def to_proto(batch: KvBatch, block_size: int) -> common_pb2.KvEventBatch:
    return common_pb2.KvEventBatch(
        sequence_number=number_of(batch),
        timestamp=batch.timestamp_s,
        dp_rank=0,
        events=[_event(number, change, block_size) for number, change in enumerate(batch.changes)],
    )


def _event(number: int, change: CacheChange, block_size: int) -> common_pb2.KvCacheEvent:
    if isinstance(change, tokenspeed_cc.AllBlocksCleared):
        return common_pb2.KvCacheEvent(event_id=number, cleared=common_pb2.KvCacheCleared())
    own_hash, tier = signed(change.block_hash), _TIERS[change.medium]
    if isinstance(change, tokenspeed_cc.BlockRemoved):
        removed = common_pb2.KvBlocksRemoved(block_hashes=[own_hash], tier=tier)
        return common_pb2.KvCacheEvent(event_id=number, removed=removed)
    block = common_pb2.KvBlock(block_hash=own_hash, token_ids=change.token_ids, block_size=block_size)
    parent = None if change.parent_hash is None else signed(change.parent_hash)
    stored = common_pb2.KvBlocksStored(blocks=[block], parent_block_hash=parent, tier=tier)
    return common_pb2.KvCacheEvent(event_id=number, stored=stored)
