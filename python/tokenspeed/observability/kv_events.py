# SPDX-License-Identifier: MIT
"""KV-cache events as other programs read them: encoding, sequence numbers, replay. No socket is opened here.

Three frames leave through a PUB socket: topic, sequence number (8 bytes, big endian), msgpack of
[timestamp, [event, ...], attn_dp_rank]. A subscriber that missed some sends 8 bytes, the first number it wants, to a
ROUTER socket and gets (sequence number, payload) frames, closed by number -1 with an empty payload.

`EventLog` belongs to the thread that publishes; it is a bounded buffer, and what falls out of it is gone.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

END_OF_REPLAY = -1
_SEQUENCE = struct.Struct(">q")


HOST_MEDIUM = "CPU_TIER1"
"""What subscribers call the tier in a host's memory."""


@dataclass(frozen=True)
class BlockStored:
    """A full block can be reused. Hashes are signed 64 bits; parent_hash is None for a prompt's first block. medium:
    None for the device, else the tier."""

    block_hash: int
    parent_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    medium: str | None

    def wire(self) -> list[Any]:
        """On the device the five elements that every subscriber knows; elsewhere an adapter's id (none) and the tier
        behind them, because a subscriber that overlooked the tier would take the block for one on the device."""
        tail = [] if self.medium is None else [None, self.medium]
        return ["BlockStored", [self.block_hash], self.parent_hash, list(self.token_ids), self.block_size, *tail]


@dataclass(frozen=True)
class BlockRemoved:
    """A block can no longer be reused on `medium` (None: the device)."""

    block_hash: int
    medium: str | None

    def wire(self) -> list[Any]:
        tail = [] if self.medium is None else [self.medium]
        return ["BlockRemoved", [self.block_hash], *tail]


@dataclass(frozen=True)
class AllBlocksCleared:
    """The whole prefix cache was dropped."""

    def wire(self) -> list[Any]:
        return ["AllBlocksCleared"]


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def signed(block_hash: int) -> int:
    """64 bits as subscribers read them."""
    return block_hash - (1 << 64) if block_hash >> 63 else block_hash


def encode_batch(timestamp_s: float, events: Sequence[KvEvent], attn_dp_rank: int) -> bytes:
    """The payload of one batch; timestamp in seconds since the Unix epoch."""
    return msgspec.msgpack.encode([timestamp_s, [event.wire() for event in events], attn_dp_rank])


def encode_sequence(sequence: int) -> bytes:
    """8 bytes, big endian; END_OF_REPLAY is -1."""
    return _SEQUENCE.pack(sequence)


def decode_sequence(frame: bytes) -> int:
    """Raises ValueError when the frame is not 8 bytes."""
    if len(frame) != _SEQUENCE.size:
        raise ValueError(f"a sequence number has 8 bytes, not {len(frame)}")
    return int(_SEQUENCE.unpack(frame)[0])


@dataclass
class EventLog:
    """Keeps the last `buffer_steps` batches for replay. Their numbers come from whoever gathers them and only rise."""

    topic: bytes
    buffer_steps: int
    _kept: deque[tuple[int, bytes]] = field(init=False)

    def __post_init__(self) -> None:
        self._kept = deque(maxlen=self.buffer_steps)

    def publish(self, sequence: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
        """Keeps a batch and returns the three frames to send."""
        self._kept.append((sequence, payload))
        return self.topic, encode_sequence(sequence), payload

    def replay(self, start: int) -> Iterator[tuple[bytes, bytes]]:
        """(sequence, payload) frames from `start` on, then the end mark.

        Batches older than the buffer are missing: the first number tells the subscriber that it has a gap.
        """
        for sequence, payload in self._kept:
            if sequence >= start:
                yield encode_sequence(sequence), payload
        yield encode_sequence(END_OF_REPLAY), b""
