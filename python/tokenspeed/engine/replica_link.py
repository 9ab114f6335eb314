# SPDX-License-Identifier: MIT
"""What crosses between an `Engine` and the replicas that it started, over a pair of sockets. Data only.

Both ends are one release on one machine, and only the process that made the pair has its ends; so messages are pickled,
as orders to ranks are. Downwards: a `Setup`, then lists of commands, `Call`s, and None for the end. Upwards: `Ready` or
`Failed`, then step outputs, `Returned`, `KvChanges`, `ReplicaState`; `Failed` once more where the loop dies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.engine.kv_feed import CacheChange


@dataclass(frozen=True)
class Setup:
    """The engine's flags, and which of its replicas this is."""

    flags: Mapping[str, Any]
    data_rank: int


@dataclass(frozen=True)
class Call:
    """A method of `Operations`, or one of a replica's `Desk`; answered by the `Returned` of its number."""

    number: int
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class ReplicaState:
    """What others may read of a replica without asking it. collects: whether a weight update is not finished. asleep:
    tags of what is released."""

    weight_version: str
    model_path: str
    is_paused: bool
    collects: bool
    asleep: tuple[str, ...]
    late_compiles: int


@dataclass(frozen=True)
class Ready:
    """num_blocks: that requests can have."""

    num_blocks: int
    state: ReplicaState


@dataclass(frozen=True)
class Failed:
    """An error's type and text: of the start, or of the loop."""

    kind: str
    text: str


@dataclass(frozen=True)
class Returned:
    """value: of the call. error: (type, text, HTTP status or 0) where it raised."""

    number: int
    value: Any
    error: tuple[str, str, int] | None
    state: ReplicaState


@dataclass(frozen=True)
class KvChanges:
    """What one turn changed in the replica's prefix cache."""

    timestamp_s: float
    changes: Sequence[CacheChange]
