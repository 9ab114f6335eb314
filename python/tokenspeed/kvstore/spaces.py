# SPDX-License-Identifier: MIT
"""Which blocks of the store belong together: those of the same weights, computed and laid out the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Spaces:
    """lasting: of the weights that the engine starts with; None where nobody can name them. run: its own word."""

    lasting: str | None
    run: str

    def of(self, version: int) -> str:
        """The space of a version of the weights; what came after the start is nobody else's, and ends with the run."""
        return f"{self._prefix}{version}" if version or self.lasting is None else self.lasting

    def is_own(self, space: str) -> bool:
        """Whether it ends with the run."""
        return space.startswith(self._prefix)

    @property
    def _prefix(self) -> str:
        return f"run-{self.run}-"


def lasting_space(files: Sequence[Path], facts: Sequence[object]) -> str:
    """files: of the checkpoint, known by place, size and time. facts: all else that decides a block's bytes."""
    seen = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    return hashlib.sha256(repr((seen, [str(fact) for fact in facts])).encode()).hexdigest()[:32]
