# SPDX-License-Identifier: MIT
"""KV events as a subscriber decodes them, over real sockets once, and what the replay gives."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from tokenspeed.observability.kv_events import (
    HOST_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventLog,
    decode_sequence,
    encode_batch,
    encode_sequence,
)

STORED = BlockStored(block_hash=-5, parent_hash=None, token_ids=[1, 2], block_size=2, medium=None)


def test_a_batch_decodes_to_the_published_arrays() -> None:
    payload = encode_batch(1.5, [STORED, BlockRemoved(7, None), AllBlocksCleared()], attn_dp_rank=3)
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [["BlockStored", [-5], None, [1, 2], 2], ["BlockRemoved", [7]], ["AllBlocksCleared"]],
        3,
    ]


def test_a_block_in_host_memory_says_so_behind_what_every_subscriber_reads() -> None:
    stored = BlockStored(5, 4, [1, 2], 2, HOST_MEDIUM)
    payload = encode_batch(0.0, [stored, BlockRemoved(5, HOST_MEDIUM)], attn_dp_rank=0)
    assert msgspec.msgpack.decode(payload)[1] == [
        ["BlockStored", [5], 4, [1, 2], 2, None, "CPU_TIER1"],
        ["BlockRemoved", [5], "CPU_TIER1"],
    ]


def test_sequence_numbers_are_eight_bytes_big_endian() -> None:
    assert encode_sequence(1) == b"\0\0\0\0\0\0\0\1"
    assert decode_sequence(encode_sequence(-1)) == -1
    with pytest.raises(ValueError, match="8 bytes, not 3"):
        decode_sequence(b"abc")


def test_replay_gives_what_is_kept_from_the_start_asked_and_an_end_mark() -> None:
    log = EventLog(topic=b"kv", buffer_steps=3)
    for number in range(5):
        topic, sequence, payload = log.publish(number, b"%d" % number)
        assert (topic, decode_sequence(sequence), payload) == (b"kv", number, b"%d" % number)
    kept = [(decode_sequence(sequence), payload) for sequence, payload in log.replay(3)]
    assert kept == [(3, b"3"), (4, b"4"), (-1, b"")]
    assert decode_sequence(next(log.replay(0))[0]) == 2  # 0 and 1 have fallen out: the gap shows
    assert [payload for _, payload in log.replay(99)] == [b""]


def test_a_subscriber_gets_three_frames_through_a_socket() -> None:
    log = EventLog(topic=b"kv-events", buffer_steps=8)
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher, context.socket(zmq.SUB) as subscriber:
        publisher.bind("inproc://kv-events")
        subscriber.connect("inproc://kv-events")
        subscriber.subscribe(b"kv-events")
        subscriber.setsockopt(zmq.RCVTIMEO, 5000)
        assert publisher.poll(0) == 0
        frames = log.publish(0, encode_batch(0.0, [STORED], 0))
        # The subscription travels to the publisher first; in process that takes a moment.
        for _ in range(100):
            publisher.send_multipart(frames)
            if subscriber.poll(50):
                break
        assert tuple(subscriber.recv_multipart()) == frames
