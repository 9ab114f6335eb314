# SPDX-License-Identifier: MIT
"""Bytes that are almost right: seeded mutations of real messages, and msgpack of anything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec


def mutations(payload: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` payloads: cut, with bytes flipped, inserted, repeated; elements of the decoded array replaced; noise."""
    rng = random.Random(seed)
    array = msgspec.msgpack.decode(payload)
    ways = (_cut, _flip, _insert, _repeat, _replace, _noise)
    for _ in range(count):
        yield rng.choice(ways)(rng, payload, array)


VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, 2**64 - 1, -(2**63), -0.5, float("nan"), float("inf"), 1e308),
    *("", "x", "\0", "x" * 100_000, b"\xff", msgspec.msgpack.Ext(5, b"x")),
    *([], [[]], [None], [-1], [2**63], ["a"], [[1]], [[-1]], [0.5], [True], list(range(100_000))),
    *({}, {"a": 1}, {"1": float("nan")}, {-1: 1.0}, {2**63: 1.0}, {"a": {"b": [1]}}),
)
"""Of every type, with what is too large, too long, or no number."""


def every_place(payload: bytes) -> Iterator[bytes]:
    """An array with each of `VALUES` in each place, and in each place of the arrays in it; and of each length."""
    array = msgspec.msgpack.decode(payload)
    for length in range(len(array) + 4):
        yield msgspec.msgpack.encode([*array, *[1] * 4][:length])
    inner = [(place, index) for place, item in enumerate(array) if isinstance(item, list) for index in range(len(item))]
    for value in VALUES:
        for place in range(1, len(array)):
            yield msgspec.msgpack.encode([*array[:place], value, *array[place + 1 :]])
        for place, index in inner:
            changed = [*array[place][:index], value, *array[place][index + 1 :]]
            yield msgspec.msgpack.encode([*array[:place], changed, *array[place + 1 :]])


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A value of any msgpack type."""
    kinds = 9 if depth < 3 else 7
    match rng.randrange(kinds):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice([0, -1, 2**31, -(2**63), 2**64 - 1, rng.randrange(1000)])
        case 3:
            return rng.choice([0.0, float("nan"), float("inf"), -1e308, rng.random()])
        case 4:
            return rng.choice(["", "x" * rng.randrange(50), "\u0000", "rid"])
        case 5:
            return rng.randbytes(rng.randrange(20))
        case 6:
            return msgspec.msgpack.Ext(rng.randrange(-128, 128), rng.randbytes(rng.randrange(9)))
        case 7:
            return [anything(rng, depth + 1) for _ in range(rng.randrange(5))]
        case _:
            return {str(key): anything(rng, depth + 1) for key in range(rng.randrange(4))}


def _cut(rng: random.Random, payload: bytes, _array: Any) -> bytes:
    return payload[: rng.randrange(len(payload))]


def _flip(rng: random.Random, payload: bytes, _array: Any) -> bytes:
    changed = bytearray(payload)
    for _ in range(rng.randrange(1, 5)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _insert(rng: random.Random, payload: bytes, _array: Any) -> bytes:
    place = rng.randrange(len(payload))
    return payload[:place] + rng.randbytes(rng.randrange(1, 8)) + payload[place:]


def _repeat(rng: random.Random, payload: bytes, _array: Any) -> bytes:
    start = rng.randrange(len(payload))
    end = rng.randrange(start, len(payload))
    return payload[:end] + payload[start:]


def _replace(rng: random.Random, _payload: bytes, array: Any) -> bytes:
    """Well-formed, with the wrong thing in one place, at the top or one level down."""
    copy = [list(item) if isinstance(item, list) else item for item in array]
    lists = [item for item in copy if isinstance(item, list) and item]
    target = rng.choice(lists) if lists and rng.random() < 0.5 else copy
    target[rng.randrange(len(target))] = anything(rng)
    return msgspec.msgpack.encode(copy)


def _noise(rng: random.Random, _payload: bytes, _array: Any) -> bytes:
    return rng.randbytes(rng.randrange(60)) if rng.random() < 0.5 else msgspec.msgpack.encode(anything(rng))
