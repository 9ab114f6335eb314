# SPDX-License-Identifier: MIT
"""Blocks on a disk, a file each, for engines of this machine and for those that come after them.

A file's name is its block's hash; in it are the proof (the hash before and the tokens), a checksum and the bytes of
every layer. Files appear whole, by a rename. What does not prove itself is deleted and was never there. The folder is
kept below a size by deleting what was not used for longest, whoever put it. One thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenspeed.kvstore.order import Names

logger = logging.getLogger("tokenspeed.engine")

_HEADER = struct.Struct("<8sQIIQ")
"""Magic, the hash before, the checksum of all behind this, number of tokens, bytes of the block."""
_MAGIC = b"TSKV\0\0\0\1"
_SUFFIX = ".kv"
_KEPT = 0.9
"""The part of the limit that is left after a clearing."""
_UNSEEN = 1 / 16
"""The part of the limit that may be put before the folder is looked at again: others put there too."""


class FileStore:
    """folder: is made where it is not. max_bytes: of all files below it. rank: whose part of each block this is, as
    "0of1". Raises OSError for a folder that cannot be used."""

    def __init__(self, folder: Path, max_bytes: int, rank: str) -> None:
        self._folder, self._max_bytes, self._rank = folder, max_bytes, rank
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # it can be written
        self._look()

    def has(self, names: Names, index: int) -> bool:
        """Whether there is a file for the block; it proves itself when it is read."""
        return self._path(names, index).exists()

    def get(self, names: Names, index: int, row: NDArray[np.uint8]) -> bool:
        """Read a block into `row`, uint8 [block_bytes]; False, and `row` holds anything, when it is not there whole.

        Raises OSError for a disk that fails.
        """
        path = self._path(names, index)
        try:
            with path.open("rb", buffering=0) as file:
                sound = _read(file, names, index, row)
        except FileNotFoundError:
            return False
        if not sound:
            logger.warning("%s is no block of its name and is deleted", path)
            path.unlink(missing_ok=True)
            return False
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return True

    def put(self, names: Names, index: int, row: NDArray[np.uint8]) -> None:
        """Keep a block, unless it is there. Raises OSError."""
        path = self._path(names, index)
        if path.exists():
            return
        size = _HEADER.size + names.token_ids[index].nbytes + row.nbytes
        if self._unseen + size > _UNSEEN * self._max_bytes:
            self._look()
        if self._num_bytes + self._unseen + size > self._max_bytes:
            self._clear_for(size)
        path.parent.mkdir(parents=True, exist_ok=True)
        number, partial = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(number, "wb", buffering=0) as file:
                _write(file, names, index, row)
            os.replace(partial, path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        self._unseen += size

    def drop(self, space: str) -> None:
        """Delete all of a space, as far as that can be done."""
        shutil.rmtree(self._folder / space, ignore_errors=True)

    def _path(self, names: Names, index: int) -> Path:
        name = f"{int(names.hashes[index]):016x}"
        return self._folder / names.space / name[:2] / f"{name}-{self._rank}{_SUFFIX}"

    def _look(self) -> list[tuple[float, int, str]]:
        """Every block's (time of its last use, size, path)."""
        files = list(self._files())
        self._num_bytes, self._unseen = sum(size for _, size, _ in files), 0
        return files

    def _clear_for(self, size: int) -> None:
        """Delete the files that were not used for longest, whosever they are."""
        for _, found, path in sorted(self._look()):
            if self._num_bytes + size <= _KEPT * self._max_bytes:
                return
            Path(path).unlink(missing_ok=True)
            self._num_bytes -= found

    def _files(self) -> Iterator[tuple[float, int, str]]:
        for folder, _, names in os.walk(self._folder):
            for name in names:
                if name.endswith(_SUFFIX):
                    path = os.path.join(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        stat = os.stat(path)
                        yield stat.st_mtime, stat.st_size, path


def _write(file: FileIO, names: Names, index: int, row: NDArray[np.uint8]) -> None:
    tokens = np.ascontiguousarray(names.token_ids[index])
    checksum = zlib.crc32(row.data, zlib.crc32(tokens.data))
    file.write(_HEADER.pack(_MAGIC, int(names.parent_hashes[index]), checksum, len(tokens), row.nbytes))
    file.write(tokens.data)
    view = memoryview(row.data)
    while view.nbytes:  # a disk that is full takes a part
        view = view[file.write(view) :]


def _read(file: FileIO, names: Names, index: int, row: NDArray[np.uint8]) -> bool:
    """Whether the file is whole and of this block; its bytes are in `row` then."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return False
    magic, parent, checksum, num_tokens, num_bytes = _HEADER.unpack(header)
    wanted = names.token_ids[index]
    if (magic, parent, num_tokens, num_bytes) != (_MAGIC, int(names.parent_hashes[index]), len(wanted), row.nbytes):
        return False
    tokens = file.read(wanted.nbytes)
    if tokens != wanted.tobytes():
        return False
    view, filled = memoryview(row.data), 0
    while filled < row.nbytes:
        count = file.readinto(view[filled:])
        if not count:
            return False
        filled += count
    return zlib.crc32(row.data, zlib.crc32(tokens)) == checksum
