# SPDX-License-Identifier: MIT
"""Weights of a folder with `*.safetensors` files, one or sharded by an index; memory-mapped by the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokenspeed.config.model_error import ModelError
from tokenspeed.weights.reader import WeightReader
from tokenspeed_kernel.api import Weight

INDEX_NAME = "model.safetensors.index.json"
_SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsReader(WeightReader):
    """Tensors of one folder. Every shard is opened when the reader is made, so a missing one is known at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        files = _weight_files(folder)
        self._open = {file: _open(file) for file in files}
        self._file_of = {name: file for file, handle in self._open.items() for name in handle.keys()}  # noqa: SIM118

    @property
    def num_tensors(self) -> int:
        return len(self._file_of)

    def has(self, name: str) -> bool:
        return name in self._file_of

    def where(self, name: str) -> str:
        return f"{self._file_of.get(name, self._folder)}: tensor {name!r}"

    def _names(self) -> set[str]:
        return set(self._file_of)

    def _fetch(self, name: str, shape: tuple[int, ...]) -> Weight:
        try:
            tensor: torch.Tensor = self._open[self._file_of[name]].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.where(name)} cannot be read: {error}; download the file again") from None
        if tensor.dtype not in _SUPPORTED:
            raise ModelError(f"{self.where(name)} has dtype {tensor.dtype}, which is not supported")
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder}: no *.safetensors file in the folder; download the weights")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index}: not an index of shards (no 'weight_map'); download it again") from None
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: the shard is missing (named in {INDEX_NAME}); download it")
    return [folder / name for name in names]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: truncated or not a safetensors file ({error}); download it again") from None
