# SPDX-License-Identifier: MIT
"""Weights as numpy files, one a tensor (`--load-format npcache`): written once from a checkpoint, mapped ever after.

The copy lies in a folder "np" beside the checkpoint, or in our cache folder where that cannot be written. It is built
under another name and renamed when it is whole, so a crash or a second process never leaves half of one behind, and
it remembers the files that it was made from: changed files make a new copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import cache_folder
from tokenspeed.weights.folder_reader import FolderReader

_INDEX = "index.json"
# numpy has no name for these; their bits are stored as integers.
_AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


class NpcacheReader(FolderReader):
    """source: the reader of the checkpoint, asked for tensors only when there is no copy yet."""

    def __init__(self, folder: Path, source: FolderReader) -> None:
        stamp = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in source.files()}
        self._copy, entries = _find(folder, stamp) or _build(folder, source, stamp)
        self._dtypes = {name: entry["dtype"] for name, entry in entries.items()}
        super().__init__(folder, {name: self._copy / entry["file"] for name, entry in entries.items()})

    def stored(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        try:
            # Copied on write, which never happens: torch asks for writable memory.
            array = np.load(file, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: damaged ({error}); delete {self._copy}, it is made again") from None
        tensor = torch.from_numpy(array)
        dtype: torch.dtype = getattr(torch, self._dtypes[name])
        return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _places(folder: Path) -> tuple[Path, Path]:
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return folder / "np", cache_folder() / "npcache" / digest


def _find(folder: Path, stamp: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    for place in _places(folder):
        try:
            index = json.loads((place / _INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if index.get("made_from") == stamp:
            return place, index["tensors"]
    return None


def _build(folder: Path, source: FolderReader, stamp: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    place = next((place for place in _places(folder) if _is_writable(place.parent)), None)
    if place is None:
        raise ModelError(f"{folder}: neither it nor {cache_folder()} can be written, as --load-format npcache needs")
    scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=".np-"))
    try:
        entries = {
            name: _write(source.stored(name), scratch, number) for number, name in enumerate(sorted(source.names()))
        }
        (scratch / _INDEX).write_text(json.dumps({"made_from": stamp, "tensors": entries}), encoding="utf-8")
        _publish(scratch, place)
    except OSError as error:
        raise ModelError(f"{place}: cannot be written: {error.strerror or error}; free some space") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found = _find(folder, stamp)
    if found is None:
        raise ModelError(f"{place}: another process made it from other files; start again")
    return found


def _publish(scratch: Path, place: Path) -> None:
    """Give the whole copy its name. One of other files gives way; an equal one, just made by someone else, stays."""
    if place.is_dir():
        old = Path(tempfile.mkdtemp(dir=place.parent, prefix=".np-old-"))
        os.rename(place, old / "np")
        shutil.rmtree(old, ignore_errors=True)
    try:
        os.rename(scratch, place)
    except OSError:
        if not (place / _INDEX).is_file():
            raise


def _write(tensor: torch.Tensor, folder: Path, number: int) -> dict[str, str]:
    name = f"{number}.npy"
    plain = tensor.contiguous()
    if tensor.dtype in _AS_INTEGERS:
        plain = plain.view(_AS_INTEGERS[tensor.dtype])
    np.save(folder / name, plain.numpy(), allow_pickle=False)
    return {"file": name, "dtype": str(tensor.dtype).removeprefix("torch.")}


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
