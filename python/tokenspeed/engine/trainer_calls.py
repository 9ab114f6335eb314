# SPDX-License-Identifier: MIT
"""What trainers call on an `Engine` in their own process, by the names that they know from SGLang and vLLM.

Each is a control endpoint without HTTP, on the caller's thread. What cannot be done raises `OperationError` (engine
.errors) with the reason, and nothing has changed then; an engine that has stopped raises EngineDeadError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from tokenspeed.engine.flattened import METADATA, is_flattened, unflattened
from tokenspeed.engine.group_fields import DEFAULT_GROUP, facts_of, group_of
from tokenspeed.engine.occupation import TAGS
from tokenspeed.engine.replica_operations import AnyOperations
from tokenspeed.engine.weight_updates import Asked

_LIMIT_S = 600.0


class TrainerCalls(ABC):
    @property
    @abstractmethod
    def operations(self) -> AnyOperations: ...

    def release_memory_occupation(self, tags: Collection[str] | None = None, mode: str = "wait") -> None:
        """Give back the memory of `tags` ("weights", "kv_cache"; None: both) once nothing runs; requests that come wait
        until all is resumed. mode: what becomes of those that run: "wait" for them, "abort" them, or, if KV blocks
        stay, "keep" them where they are."""
        self.operations.release_memory(TAGS if tags is None else tags, mode, False, _LIMIT_S)

    def resume_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        """Have it again: weights with the values that they had, KV blocks empty."""
        self.operations.resume_memory(TAGS if tags is None else tags)

    def sleep(self, level: int = 1, mode: str = "wait") -> None:
        """Release everything. level 1: weights stay in the host's memory where that is another than the device's.
        level 2: they are read again."""
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, not {level}")
        self.operations.release_memory(TAGS, mode, level == 1, _LIMIT_S)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        self.resume_memory_occupation(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether anything is released."""
        return bool(self.operations.asleep)

    @property
    def weight_version(self) -> str:
        """The name of the weights that serve."""
        return self.operations.weight_version

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = DEFAULT_GROUP,
        backend: str | None = None,
    ) -> None:
        """Join a trainer's process group, which waits at a TCP address: this engine's ranks are `rank_offset` and the
        following, the trainer's is 0. backend: "nccl" or "gloo", by default as the device needs."""
        fields = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            **({} if backend is None else {"backend": backend}),
        }
        updates = self.operations.updates
        updates.join_group(group_of(fields, updates.device.type == "cpu"))

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> None:
        self.operations.updates.leave_group(group_name)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype | str],
        shapes: Sequence[Sequence[int]],
        group_name: str = DEFAULT_GROUP,
        weight_version: str | None = None,
        flush_cache: bool = False,
        load_format: str | None = None,
        abort_all_requests: bool = False,
    ) -> None:
        """Serve what the trainer broadcasts in that group, in this order, in place of the checkpoint's of these names.
        The trainer broadcasts at the same time, on another thread or process; with `load_format` "flattened_bucket" the
        bytes of all tensors, one behind the other, at once. abort_all_requests: those that run or wait end with it."""
        listed = {"names": list(names), "dtypes": list(map(str, dtypes)), "shapes": list(map(list, shapes))}
        asked = Asked(weight_version, flush_cache, abort_all_requests)
        self.operations.updates.from_group(group_name, facts_of(listed), asked, is_flattened(load_format))

    def start_weight_update(self) -> None:
        """From here on updates are collected; `finish_weight_update` serves them all at once."""
        self.operations.updates.start()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.operations.updates.finish(weight_version)

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str = "auto",
        weight_version: str | None = None,
        flush_cache: bool = False,
        abort_all_requests: bool = False,
    ) -> None:
        """Serve the checkpoint at `model_path`, all of it."""
        asked = Asked(weight_version, flush_cache, abort_all_requests)
        self.operations.updates.from_disk(model_path, load_format, asked)

    def update_weights_from_tensor(
        self,
        named_tensors: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
        weight_version: str | None = None,
        flush_cache: bool = False,
        load_format: str | None = None,
        abort_all_requests: bool = False,
    ) -> None:
        """Serve these tensors, copied, in place of the checkpoint's of their names. load_format: "flattened_bucket" for
        a mapping of `flattened_tensor` and `metadata` instead (engine.flattened)."""
        held: dict[str, Any] = dict(named_tensors)
        if is_flattened(load_format):
            metadata = held.pop(METADATA, None)
            tensors = unflattened(held, metadata)
        else:
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in held.items()}
        self.operations.updates.from_tensors(tensors, Asked(weight_version, flush_cache, abort_all_requests))
