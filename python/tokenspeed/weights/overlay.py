# SPDX-License-Identifier: MIT
"""Tensors that a trainer sent in front of the checkpoint that they belong to.

Names are the checkpoint's own, so a quantized one takes its stored parts; a dense weight in their place hides them all,
and a part that nothing reads is refused. A name that the architecture does not read is found by the check of leftovers,
a wrong shape or dtype by the read, both as for files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tokenspeed.config.model_error import ModelError
from tokenspeed.weights.folder_reader import FolderReader, check_dtype, is_dense
from tokenspeed.weights.quantized_reader import UNREAD_PARTS, WEIGHT_PARTS
from tokenspeed.weights.reader import WeightReader
from tokenspeed_kernel.api import Weight

NamedTensors = Mapping[str, torch.Tensor]

_MAY_BE_UNREAD = (*UNREAD_PARTS, "input_scale", "input_global_scale", "weight_shape")


def _where(name: str) -> str:
    return f"serialized_named_tensors: tensor {name!r}"


def overlay(reader: WeightReader, tensors: NamedTensors) -> WeightReader:
    """`reader` with `tensors` in place of, or beside, its own."""
    if not tensors:
        return reader
    return OverlaidFolder(reader, tensors) if isinstance(reader, FolderReader) else OverlaidReader(reader, tensors)


class OverlaidFolder(FolderReader):
    """Of a folder: below whatever puts stored parts together."""

    def __init__(self, base: FolderReader, tensors: NamedTensors) -> None:
        super().__init__(base.folder, {})
        self._base = base
        self._tensors = tensors
        self._fetched: set[str] = set()
        self._hidden = {part for name in tensors if is_dense(tensors[name]) for part in _stored_parts(name)}

    def stored(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            return self._base.stored(name)
        self._fetched.add(name)
        return self._tensors[name]

    def names(self) -> set[str]:
        return (self._base.names() - self._hidden) | set(self._tensors)

    def files(self) -> list[Path]:
        return self._base.files()

    @property
    def num_tensors(self) -> int:
        return len(self.names())

    def has(self, name: str) -> bool:
        return name in self._tensors or (name not in self._hidden and self._base.has(name))

    def where(self, name: str) -> str:
        return _where(name) if name in self._tensors else self._base.where(name)

    def check_parts_used(self, endings: tuple[str, ...], beginnings: tuple[str, ...]) -> None:
        for name in sorted(set(self._tensors) - self._fetched):
            if not name.endswith((*endings, *_MAY_BE_UNREAD)) and not name.startswith(beginnings):
                raise ModelError(
                    f"{_where(name)} would not be read: the checkpoint stores this weight in other parts, and goes by "
                    "those; send them, or the weight dense"
                )


class OverlaidReader(WeightReader):
    """Of any other reader."""

    def __init__(self, base: WeightReader, tensors: NamedTensors) -> None:
        super().__init__()
        self._base = base
        self._tensors = tensors
        base.replaced(tensors.keys())

    @property
    def num_tensors(self) -> int:
        return self._base.num_tensors

    def has(self, name: str) -> bool:
        return name in self._tensors or self._base.has(name)

    def where(self, name: str) -> str:
        return _where(name) if name in self._tensors else self._base.where(name)

    def files(self) -> list[Path]:
        return self._base.files()

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        return super().read(name, shape) if name in self._tensors else self._base.read(name, shape)

    def read_stack(self, name: str, shape: tuple[int, int, int]) -> list[Weight]:
        return super().read_stack(name, shape) if name in self._tensors else self._base.read_stack(name, shape)

    def scalar(self, name: str) -> float | None:
        if name not in self._tensors:
            return self._base.scalar(name)
        self._used.add(name)
        return float(self._tensors[name].float().reshape(()))

    def check_all_used(self, endings: tuple[str, ...], beginnings: tuple[str, ...]) -> None:
        super().check_all_used(endings, beginnings)
        self._base.check_all_used(endings, beginnings)

    def _names(self) -> set[str]:
        return set(self._tensors)

    def _fetch(self, name: str, shape: tuple[int, ...]) -> Weight:
        return check_dtype(self._tensors[name], _where(name))


def _stored_parts(name: str) -> list[str]:
    """What a quantized checkpoint may have in place of the dense tensor `name`."""
    module, _, last = name.rpartition(".")
    parts = [f"{module}.{part}" for part in WEIGHT_PARTS] if last == "weight" else []
    return [*parts, f"{name}_blocks", f"{name}_scales"]
