# SPDX-License-Identifier: MIT
"""Readers of a folder with checkpoint files: what they share, whatever the files are.

A sub-class opens every shard when it is made, so a missing or damaged one is known before anything is loaded, and
gives tensors by name. `stored` hands out a tensor of any dtype; `read` only what a model can compute with.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from tokenspeed.config.model_error import ModelError
from tokenspeed.weights.reader import WeightReader
from tokenspeed_kernel.api import Weight

_SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)


class FolderReader(WeightReader):
    """file_of: which file holds each tensor."""

    def __init__(self, folder: Path, file_of: dict[str, Path]) -> None:
        super().__init__()
        self.folder = folder
        self._file_of = file_of

    @abstractmethod
    def stored(self, name: str) -> torch.Tensor:
        """The tensor as it lies in its file, of any dtype and shape. Raises ModelError when it cannot be read."""

    def names(self) -> set[str]:
        """All tensors."""
        return set(self._file_of)

    def files(self) -> list[Path]:
        """The files that hold them."""
        return sorted(set(self._file_of.values()))

    @property
    def num_tensors(self) -> int:
        return len(self._file_of)

    def has(self, name: str) -> bool:
        return name in self._file_of

    def where(self, name: str) -> str:
        return f"{self._file_of.get(name, self.folder)}: tensor {name!r}"

    def scalar(self, name: str) -> float | None:
        if not self.has(name):
            return None
        self._used.add(name)
        return float(self.stored(name).float().reshape(()))

    def check_parts_used(self, endings: tuple[str, ...], beginnings: tuple[str, ...]) -> None:
        """`check_all_used` of what a reader in front puts together: raise ModelError for a part that it never took."""

    def _names(self) -> set[str]:
        return self.names()

    def _fetch(self, name: str, shape: tuple[int, ...]) -> Weight:
        return check_dtype(self.stored(name), self.where(name))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a layer can compute with it as it is."""
    return tensor.dtype in _SUPPORTED


def check_dtype(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """`tensor`, which a layer can compute with. Raises ModelError."""
    if not is_dense(tensor):
        raise ModelError(
            f"{where} has dtype {str(tensor.dtype).removeprefix('torch.')}, which no layer computes "
            "with; config.json's quantization_config must say what it means"
        )
    return tensor


def shard_files(folder: Path, index_name: str, patterns: Sequence[str]) -> list[Path]:
    """The files of a checkpoint: those its index names, or without one all that match. Raises ModelError."""
    index = folder / index_name
    if not index.is_file():
        files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
        if not files:
            raise ModelError(f"{folder}: no {' or '.join(patterns)} file in the folder; download the weights")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index}: not an index of shards (no 'weight_map'); download it again") from None
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: the shard is missing (named in {index_name}); download it")
    return [folder / name for name in names]
