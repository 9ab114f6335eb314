# SPDX-License-Identifier: MIT
"""Asks the system to read checkpoint files before the loader gets to them.

Mapped files are read a little at a time, when a page is first touched, by the one thread that loads. Here a few
threads run ahead of it through all files in order, so that a disk or a network store has many reads to serve at once.
Nothing is copied or kept: the pages are the system's, which drops them when memory is short.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

_PIECE_BYTES = 32 << 20
# The system reads no more at a call than its device takes in one request, whatever it is asked for.
_CALL_BYTES = 512 << 10


class ReadAhead:
    """A context manager: reading goes on until everything is read or it is left."""

    def __init__(self, files: Sequence[Path], num_threads: int) -> None:
        self._pieces = _pieces(files)
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, name="read-ahead", daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        self.wait()

    def wait(self) -> None:
        """Until the threads have ended."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopped:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            self._ask_for(*piece)

    def _ask_for(self, file: Path, begin: int) -> None:
        try:
            handle = os.open(file, os.O_RDONLY)
        except OSError:
            return  # whoever reads it in earnest says so
        try:
            for offset in range(begin, begin + _PIECE_BYTES, _CALL_BYTES):
                if self._stopped:
                    return
                os.posix_fadvise(handle, offset, _CALL_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(handle)


def _pieces(files: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    for file in files:
        try:
            size = file.stat().st_size
        except OSError:
            continue
        for offset in range(0, size, _PIECE_BYTES):
            yield file, offset
