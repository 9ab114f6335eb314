# SPDX-License-Identifier: MIT
"""Readers of a folder with checkpoint files: what they share, whatever the files are.

A sub-class opens every shard when it is made, so a missing or damaged one is known before anything is loaded, and
gives tensors by name. `stored` hands out a tensor of any dtype; `read` only what a model can compute with.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

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


def shard_files(folder: Path, whole: str, patterns: Sequence[str]) -> list[Path]:
    """The files of a checkpoint: those its index names, the whole one, or without either all that match.

    whole: the name of a checkpoint in one file; its index is called after it. Raises ModelError.
    """
    index = folder / f"{whole}.index.json"
    if index.is_file():
        return _indexed(folder, index)
    files = _matching(folder, patterns)
    if not files:
        raise ModelError(f"{folder}: no {' or '.join(patterns)} file in the folder; download the weights")
    # What lies beside a whole one is a variant, or the same in another library's layout.
    return [folder / whole] if folder / whole in files else files


def has_shards(folder: Path, whole: str, patterns: Sequence[str]) -> bool:
    """Whether there is anything for `shard_files`."""
    return (folder / f"{whole}.index.json").is_file() or bool(_matching(folder, patterns))


# What trainers leave beside their checkpoints, adapters, and weights under other names.
_NO_CHECKPOINT = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|adapter_model|consolidated)\b")


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    files = {file for pattern in patterns for file in folder.glob(pattern)}
    return sorted(file for file in files if not _NO_CHECKPOINT.match(file.name))


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        values = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ModelError(f"{index}: not an index of shards (no 'weight_map'); download it again") from None
    for name in values:
        if not isinstance(name, str) or not _is_inside(name):
            raise ModelError(f"{index}: names {str(name)[:80]!r}, which is no file in this folder; download it again")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: the shard is missing (named in {index.name}); download it")
    return [folder / name for name in sorted(set(values))]


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and len(name) < 256
