# SPDX-License-Identifier: MIT
"""A progress bar on stderr while weights load; nothing but the last line where stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 30
_REDRAW_S = 0.1


class Progress:
    """Counts tensors. `total` 0 means it is not known beforehand."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label = label
        self._total = total
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._started_at = time.monotonic()
        self._drawn_at = 0.0
        self._done = 0

    def advance(self) -> None:
        """One more tensor is on its device."""
        self._done += 1
        now = time.monotonic()
        if self._live and now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            self._stream.write("\r" + self._bar())
            self._stream.flush()

    def finish(self) -> None:
        """All are; says how long it took."""
        elapsed_s = time.monotonic() - self._started_at
        clear = "\r\x1b[K" if self._live else ""
        self._stream.write(f"{clear}{self._label}: {self._done} tensors in {elapsed_s:.1f} s\n")
        self._stream.flush()

    def _bar(self) -> str:
        if not self._total:
            return f"{self._label}: {self._done} tensors"
        filled = min(_WIDTH, self._done * _WIDTH // self._total)
        return f"{self._label}: [{'#' * filled}{'.' * (_WIDTH - filled)}] {self._done}/{self._total}"
