# SPDX-License-Identifier: MIT
"""`SubscribeKvEvents`: the engine's `KvLog` as a gRPC stream, with the load behind each batch and each second.

A subscriber that names a number gets what is kept from there on, then every batch as it comes; a batch that it wanted
and that is kept no more ends the stream with OUT_OF_RANGE, and it starts afresh. One that names none gets what is
cached now, a snapshot for each replica that caches anything, then every batch after it. Numbers go over all replicas.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator

import tokenspeed_cc
from tokenspeed.engine.kv_feed import CacheChange, KvBatch, KvContent, KvLog
from tokenspeed.observability.kv_events import signed
from tokenspeed.rpc.grpc.serve.info import EngineInfo
from tokenspeed_protos import common_pb2

LOAD_INTERVAL_S = 1.0
BLOCKS_PER_CHUNK = 256
_TIERS = {"device": common_pb2.KV_CACHE_TIER_DEVICE, "host": common_pb2.KV_CACHE_TIER_HOST}


class BatchesLost(Exception):
    """Batches that the subscriber asked for are kept no more."""


async def kv_stream(
    log: KvLog, info: EngineInfo, start: int, loads_first: bool
) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
    """start: the first number wanted, from 1; 0: what is cached now. loads_first: whether the load may come before any
    batch. Raises BatchesLost. Ends when it is closed."""
    event_loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[KvBatch] = asyncio.Queue()

    def listen(batch: KvBatch) -> None:
        event_loop.call_soon_threadsafe(arrived.put_nowait, batch)

    number, begun = _begun(log, listen, start)
    try:
        sample, has_begun = 0, loads_first
        for told in begun:
            has_begun = True
            yield told
            await asyncio.sleep(0)  # a large snapshot holds nobody up
        while True:
            if has_begun:
                for rank in info.serving_ranks():
                    sample += 1
                    load = info.load_record(rank, sample)
                    yield common_pb2.KvEventBatch(
                        sequence_number=number, timestamp=time.time(), dp_rank=rank, load=load
                    )
            try:
                batch = await asyncio.wait_for(arrived.get(), LOAD_INTERVAL_S)
            except TimeoutError:
                continue
            number, has_begun = number_of(batch.sequence), True
            yield to_proto(batch, log.block_size)
    finally:
        log.unsubscribe(listen)


def number_of(sequence: int) -> int:
    """Numbers start at 1 here, so that 0 can mean "none yet"."""
    return sequence + 1


def to_proto(batch: KvBatch, block_size: int) -> common_pb2.KvEventBatch:
    return common_pb2.KvEventBatch(
        sequence_number=number_of(batch.sequence),
        timestamp=batch.timestamp_s,
        dp_rank=batch.data_rank,
        events=[_event(number, change, block_size) for number, change in enumerate(batch.changes)],
    )


def _begun(log: KvLog, listen: Callable[[KvBatch], None], start: int) -> tuple[int, Iterator[common_pb2.KvEventBatch]]:
    """Subscribes. The number of the last batch that `listen` will not be given, and what the stream begins with."""
    if not start:
        content = log.subscribe_afresh(listen)
        return number_of(content.sequence), _snapshots(content, log.block_size)
    kept = log.subscribe(listen)
    first, last = (number_of(kept[0].sequence), number_of(kept[-1].sequence)) if kept else (1, 0)
    if not first <= start <= last + 1:
        log.unsubscribe(listen)
        raise BatchesLost(f"batch {start} is not kept; there are {first} to {last}")
    return last, (to_proto(batch, log.block_size) for batch in kept if number_of(batch.sequence) >= start)


def _snapshots(content: KvContent, block_size: int) -> Iterator[common_pb2.KvEventBatch]:
    """Everything is told from the first batch on, so nothing is unknown before any."""
    for rank, blocks in content.blocks.items():
        starts = range(0, len(blocks), BLOCKS_PER_CHUNK)
        for index, begin in enumerate(starts):
            chunk = blocks[begin : begin + BLOCKS_PER_CHUNK]
            yield common_pb2.KvEventBatch(
                sequence_number=number_of(content.sequence),
                timestamp=time.time(),
                dp_rank=rank,
                events=[_event(number, block, block_size) for number, block in enumerate(chunk)],
                snapshot=common_pb2.KvSnapshotChunk(
                    index=index, count=len(starts), blocks=len(blocks), unknown_before=0
                ),
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
