# SPDX-License-Identifier: MIT
"""`Operations` of several replicas: each call goes to all that serve, at the same time, and returns when all have
answered.

The first that could not is raised then; the others may have done it. Any thread may call. What is only read is what
each replica told last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch

from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.messages import LoadNumbers
from tokenspeed.engine.operations import Operations
from tokenspeed.engine.replica_link import ReplicaState
from tokenspeed.engine.weight_updates import Asked
from tokenspeed.models import NamedTensors
from tokenspeed.observability.replica_metrics import merged_metrics
from tokenspeed.parallel.trainer import TensorFacts, TrainerGroup

_LIMIT_S = 3600.0
"""New weights may come from a slow disk."""


class Callee(Protocol):
    """One replica."""

    @property
    def is_alive(self) -> bool: ...
    @property
    def data_rank(self) -> int: ...
    @property
    def state(self) -> ReplicaState: ...
    def call(self, name: str, arguments: tuple[Any, ...]) -> Future[Any]: ...


class SharedOperations:
    """num_ranks, device: of each replica."""

    def __init__(self, replicas: Sequence[Callee], num_ranks: int, device: torch.device) -> None:
        self._replicas = replicas
        self.changing_weights = threading.Lock()
        """Held while weights change, and while a replica that was started again is let in."""
        self.updates = SharedUpdates(self, num_ranks, device)

    def call(self, name: str, *arguments: Any) -> dict[int, Any]:
        """What each replica's method returned, by number. Raises what the first one raised."""
        return self.call_each(name, lambda _: arguments)

    def call_each(self, name: str, arguments: Callable[[int], tuple[Any, ...]]) -> dict[int, Any]:
        """The same, with arguments of each replica's own."""
        with self.changing_weights if name.startswith("updates.") else nullcontext():
            serving = self._serving()
            futures = {replica.data_rank: replica.call(name, arguments(replica.data_rank)) for replica in serving}
            errors = [error for future in futures.values() if (error := future.exception(_LIMIT_S)) is not None]
        if errors:
            raise errors[0]
        return {rank: future.result() for rank, future in futures.items()}

    @property
    def weight_version(self) -> str:
        return self._serving()[0].state.weight_version

    @property
    def model_path(self) -> str:
        return self._serving()[0].state.model_path

    @property
    def is_paused(self) -> bool:
        return any(replica.state.is_paused for replica in self._serving())

    @property
    def asleep(self) -> Collection[str]:
        return sorted({tag for replica in self._serving() for tag in replica.state.asleep})

    def flush_cache(self) -> None:
        self.call("flush_cache")

    def pause(self, mode: str, timeout_s: float) -> None:
        self.call("pause", mode, timeout_s)

    def resume(self) -> None:
        self.call("resume")

    def abort(self, rid: str) -> int:
        return sum(self.call("abort", rid).values())

    def abort_all(self) -> int:
        return sum(self.call("abort_all").values())

    def load_numbers(self) -> LoadNumbers:
        """Of all together."""
        return LoadNumbers.sum_of(self.call("load_numbers").values())

    def loads(self) -> dict[int, LoadNumbers]:
        return self.call("load_numbers")

    def start_profile(self, fields: Mapping[str, Any]) -> str:
        return "; ".join(self.call("start_profile", dict(fields)).values())

    def stop_profile(self) -> str:
        return "; ".join(self.call("stop_profile").values())

    def release_memory(self, tags: Collection[str], mode: str, keep: bool, timeout_s: float) -> None:
        self.call("release_memory", tuple(tags), mode, keep, timeout_s)

    def resume_memory(self, tags: Collection[str]) -> None:
        self.call("resume_memory", tuple(tags))

    def close(self) -> None:
        """No loop of this process waits for calls."""

    def render(self) -> bytes:
        """The metrics of all, each with its replica's number."""
        return merged_metrics({rank: text.decode() for rank, text in self.call("metrics").items()}).encode()

    @property
    def collects(self) -> bool:
        """Whether a weight update is not finished."""
        return any(replica.state.collects for replica in self._serving())

    def _serving(self) -> list[Callee]:
        serving = [replica for replica in self._replicas if replica.is_alive]
        if not serving:
            raise EngineDeadError("the engine has stopped")
        return serving


class SharedUpdates:
    """`WeightUpdates` of all of them."""

    def __init__(self, operations: SharedOperations, num_ranks: int, device: torch.device) -> None:
        self.device = device
        self._operations = operations
        self._num_ranks = num_ranks

    def join_group(self, group: TrainerGroup) -> None:
        """Each replica's ranks follow those of the replica before."""

        def own(data_rank: int) -> tuple[TrainerGroup]:
            return (replace(group, rank_offset=group.rank_offset + data_rank * self._num_ranks),)

        self._operations.call_each("updates.join_group", own)

    def leave_group(self, name: str) -> None:
        self._operations.call("updates.leave_group", name)

    def from_group(self, name: str, facts: Sequence[TensorFacts], asked: Asked, flattened: bool) -> None:
        self._operations.call("updates.from_group", name, facts, asked, flattened)

    @property
    def collects(self) -> bool:
        return self._operations.collects

    def rename(self, version: str) -> None:
        self._operations.call("updates.rename", version)

    def from_disk(self, model_path: str, load_format: str, asked: Asked) -> None:
        self._operations.call("updates.from_disk", model_path, load_format, asked)

    def from_tensors(self, tensors: NamedTensors, asked: Asked) -> None:
        self._operations.call("updates.from_tensors", tensors, asked)

    def start(self) -> None:
        self._operations.call("updates.start")

    def finish(self, version: str | None) -> None:
        self._operations.call("updates.finish", version)


AnyOperations = Operations | SharedOperations
