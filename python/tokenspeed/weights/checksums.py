# SPDX-License-Identifier: MIT
"""Checksums that lie beside weights: a file whose SHA-256 is told there is compared with it before anything is loaded.

`SHA256SUMS` is what sha256sum(1) writes, a line a file; "NAME.sha256" is the same, or the bare number, for one file.
Weights without either are taken as they are: reading them twice costs as much as loading them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenspeed.config.model_error import ModelError

SUMS_NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64})(?: [ *](.+))?")
_NUM_THREADS = 4


def check_sums(files: Sequence[Path]) -> None:
    """Raises ModelError for a file that is not what its checksum says, and for sums that cannot be read."""
    told = {file: (want, where) for file in files if (found := _told(file)) is not None for want, where in [found]}
    if not told:
        return
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for (file, (want, where)), have in zip(told.items(), pool.map(_sha256, told)):
            if have != want:
                raise ModelError(f"{file}: wrong SHA-256 {have}, {where.name} says {want}; download it again")


def _told(file: Path) -> tuple[str, Path] | None:
    """The file's checksum, and where it stands."""
    own, shared = file.with_name(f"{file.name}.sha256"), file.with_name(SUMS_NAME)
    for sums in (own, shared):
        for want, name in _entries(sums):
            if name == file.name or (sums == own and not name):
                return want, sums
    return None


def _entries(sums: Path) -> list[tuple[str, str]]:
    """(checksum, name of the file without its folder, "" for none) of each line; none where there is no such file."""
    if not sums.is_file():
        return []
    entries = []
    for number, line in enumerate(sums.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ModelError(f"{sums}: line {number} is no SHA-256 and name; write it with sha256sum, or delete it")
        entries.append((match[1].lower(), Path(match[2] or "").name))
    return entries


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
