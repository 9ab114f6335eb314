# SPDX-License-Identifier: MIT
"""The header of a GGUF file: metadata and where each tensor's bytes lie. No torch, no tensor data is read.

Follows the GGUF specification, versions 2 and 3, little-endian. Called at start-up by the model configuration, the
tokenizer and the weight loader, each in its own process; a 49,152-token vocabulary reads in about 0.1 s. Whatever a
file claims is checked against its size before it is believed, so a truncated or foreign file is a `GGUFError`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.config.model_error import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4


class GGUFError(ModelError):
    """A file that is not GGUF, or not one that can be read; one line that names the file."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file.

    shape: rows first, as torch would have it (GGUF stores the innermost dimension first).
    type: lower-case GGML name, such as "f32" or "q4_1".
    offset: of the first byte, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header. Metadata values are int, float, bool, str or lists of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


@dataclass(frozen=True)
class _TensorType:
    name: str
    block_values: int
    block_bytes: int


_TENSOR_TYPES: dict[int, _TensorType] = {
    0: _TensorType("f32", 1, 4),
    1: _TensorType("f16", 1, 2),
    2: _TensorType("q4_0", 32, 18),
    3: _TensorType("q4_1", 32, 20),
    6: _TensorType("q5_0", 32, 22),
    7: _TensorType("q5_1", 32, 24),
    8: _TensorType("q8_0", 32, 34),
    10: _TensorType("q2_k", 256, 84),
    11: _TensorType("q3_k", 256, 110),
    12: _TensorType("q4_k", 256, 144),
    13: _TensorType("q5_k", 256, 176),
    14: _TensorType("q6_k", 256, 210),
    15: _TensorType("q8_k", 256, 292),
    16: _TensorType("iq2_xxs", 256, 66),
    17: _TensorType("iq2_xs", 256, 74),
    18: _TensorType("iq3_xxs", 256, 98),
    19: _TensorType("iq1_s", 256, 50),
    20: _TensorType("iq4_nl", 32, 18),
    21: _TensorType("iq3_s", 256, 110),
    22: _TensorType("iq2_s", 256, 82),
    23: _TensorType("iq4_xs", 256, 136),
    24: _TensorType("i8", 1, 1),
    25: _TensorType("i16", 1, 2),
    26: _TensorType("i32", 1, 4),
    27: _TensorType("i64", 1, 8),
    28: _TensorType("f64", 1, 8),
    29: _TensorType("iq1_m", 256, 56),
    30: _TensorType("bf16", 1, 2),
    34: _TensorType("tq1_0", 256, 54),
    35: _TensorType("tq2_0", 256, 66),
    39: _TensorType("mxfp4", 32, 17),
}

# Metadata value types by their number in the file; 8 is a string, 9 an array.
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of the GGUF file at `path`.

    Raises GGUFError: the file does not exist, is not GGUF, has an unsupported version, or is shorter than it claims.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise GGUFError(f"{path}: the file is empty; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def read(self) -> GGUFFile:
        if self.data[:4] != MAGIC:
            raise GGUFError(f"{self.path}: not a GGUF file (it starts with {self.data[:4]!r}, not {MAGIC!r})")
        self.at = 4
        try:
            version = self._u32()
            if version not in VERSIONS:
                swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
                what = f"is big-endian (version {swapped})" if swapped in VERSIONS else f"has GGUF version {version}"
                raise GGUFError(f"{self.path}: {what}; only little-endian versions 2 and 3 are supported, convert it")
            num_tensors, num_values = self._u64(), self._u64()
            metadata = dict(self._metadata_entry() for _ in range(num_values))
            entries = [self._tensor_entry() for _ in range(num_tensors)]
        except struct.error:
            raise self._truncated("its header") from None
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        start = -(-self.at // alignment) * alignment
        tensors = {entry.name: self._placed(entry, start) for entry in entries}
        return GGUFFile(self.path, metadata, tensors)

    def _metadata_entry(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._u32(), key)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._u32(), self._u64()
            if item_kind == _STRING:
                return self._strings(count)
            if item_kind == _ARRAY:
                return [self._value(_ARRAY, key) for _ in range(count)]
            return list(self._scalars(item_kind, count, key))
        return self._scalars(kind, 1, key)[0]

    def _scalars(self, kind: int, count: int, key: str) -> tuple[Any, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise GGUFError(f"{self.path}: metadata {key!r} has value type {kind}, which GGUF does not define")
        if count > self.size:
            raise self._truncated(f"metadata {key!r}")
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def _strings(self, count: int) -> list[str]:
        # Vocabularies and merges make up nearly all of a header, so this loop keeps everything in locals.
        data, at, size = self.data, self.at, self.size
        if count > size:
            raise self._truncated("an array of strings")
        texts: list[str] = []
        keep: Callable[[str], None] = texts.append
        for _ in range(count):
            end = at + 8 + _U64(data, at)[0]
            if end > size:
                raise self._truncated("an array of strings")
            keep(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self.at = at
        return texts

    def _tensor_entry(self) -> GGUFTensor:
        name = self._string()
        num_dimensions = self._u32()
        if num_dimensions > MAX_DIMENSIONS:
            raise GGUFError(f"{self.path}: tensor {name!r} has {num_dimensions} dimensions; the file is damaged")
        inner_first = [self._u64() for _ in range(num_dimensions)]
        kind = self._u32()
        offset = self._u64()
        found = _TENSOR_TYPES.get(kind)
        if found is None:
            raise GGUFError(
                f"{self.path}: tensor {name!r} has type number {kind}, which is not known; convert the file"
            )
        if 0 in inner_first:
            raise GGUFError(f"{self.path}: tensor {name!r} has no values; the file is damaged")
        if inner_first and inner_first[0] % found.block_values:
            raise GGUFError(
                f"{self.path}: rows of tensor {name!r} have {inner_first[0]} values, not a multiple of "
                f"{found.block_values} as {found.name} needs; the file is damaged"
            )
        nbytes = math.prod(inner_first) // found.block_values * found.block_bytes
        return GGUFTensor(name, tuple(reversed(inner_first)), found.name, offset, nbytes)

    def _placed(self, entry: GGUFTensor, start: int) -> GGUFTensor:
        offset = start + entry.offset
        if offset + entry.nbytes > self.size:
            raise self._truncated(f"tensor {entry.name!r}", offset + entry.nbytes)
        return GGUFTensor(entry.name, entry.shape, entry.type, offset, entry.nbytes)

    def _string(self) -> str:
        end = self.at + 8 + _U64(self.data, self.at)[0]
        if end > self.size:
            raise self._truncated("a string of its header")
        text = self.data[self.at + 8 : end].decode("utf-8", "replace")
        self.at = end
        return text

    def _u32(self) -> int:
        (value,) = _U32(self.data, self.at)
        self.at += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64(self.data, self.at)
        self.at += 8
        return int(value)

    def _truncated(self, what: str, needed: int | None = None) -> GGUFError:
        more = f" (it has {self.size} bytes and needs {needed})" if needed else f" (it has {self.size} bytes)"
        return GGUFError(f"{self.path}: the file is truncated in {what}{more}; download it again")
