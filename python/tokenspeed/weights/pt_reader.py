# SPDX-License-Identifier: MIT
"""Weights of a folder with files of `torch.save` (`--load-format pt`), one or sharded by an index; memory-mapped.

Only tensors are unpickled (torch's weights_only), so a file cannot run code.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from tokenspeed.config.model_error import ModelError
from tokenspeed.weights.folder_reader import FolderReader, shard_files

WHOLE_NAME = "pytorch_model.bin"
PATTERNS = ("*.bin", "*.pt")


class PtReader(FolderReader):
    """Tensors of one folder."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        file_of: dict[str, Path] = {}
        for file in shard_files(folder, WHOLE_NAME, PATTERNS):
            tensors = _load(file)
            self._tensors.update(tensors)
            file_of.update(dict.fromkeys(tensors, file))
        super().__init__(folder, file_of)

    def stored(self, name: str) -> torch.Tensor:
        return self._tensors[name].contiguous()


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_mappable(file))
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{file}: holds more than tensors, or is no file of torch.save ({_first_line(error)}); "
            "convert it to safetensors"
        ) from None
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise ModelError(f"{file}: truncated or damaged ({_first_line(error)}); download it again") from None
    values = values.get("state_dict", values) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ModelError(f"{file}: not a dictionary of tensors; give a file of weights")
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _is_mappable(file: Path) -> bool:
    """Files of old versions of torch are no archives, and are read instead of mapped."""
    with file.open("rb") as data:
        return data.read(4) == b"PK\x03\x04"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
