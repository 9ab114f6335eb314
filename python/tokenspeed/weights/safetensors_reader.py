# SPDX-License-Identifier: MIT
"""Weights of a folder with `*.safetensors` files, one or sharded by an index; memory-mapped by the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokenspeed.config.model_error import ModelError
from tokenspeed.weights.folder_reader import FolderReader, shard_files

WHOLE_NAME = "model.safetensors"
PATTERNS = ("*.safetensors",)


class SafetensorsReader(FolderReader):
    """Tensors of one folder."""

    def __init__(self, folder: Path) -> None:
        self._open = {file: _open(file) for file in shard_files(folder, WHOLE_NAME, PATTERNS)}
        names = {name: file for file, handle in self._open.items() for name in handle.keys()}  # noqa: SIM118
        super().__init__(folder, names)

    def stored(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._open[self._file_of[name]].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.where(name)} cannot be read: {error}; download the file again") from None
        return tensor


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: truncated or not a safetensors file ({error}); download it again") from None
