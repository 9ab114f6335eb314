# SPDX-License-Identifier: MIT
"""Packed weights: the GGUF block formats we read, and the value that carries packed bytes around.

A packed row is a run of blocks; a block holds a fixed number of values in a fixed number of bytes. The byte
layouts are those of the GGUF specification; `quant/reference.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

GGUF_LAYOUT = "gguf"
ROWS_LAYOUT = "rows"


class BlockFormat(NamedTuple):
    """Values and bytes of one block along K."""

    num_values: int
    num_bytes: int


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "q4_0": BlockFormat(32, 18),
    "q4_1": BlockFormat(32, 20),
    "q5_0": BlockFormat(32, 22),
    "q5_1": BlockFormat(32, 24),
    "q8_0": BlockFormat(32, 34),
    "q4_k": BlockFormat(256, 144),
    "q5_k": BlockFormat(256, 176),
    "q6_k": BlockFormat(256, 210),
}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] whose bytes are not a dense tensor.

    data: the bytes. In layout "gguf": uint8 [N, row_bytes]; in another layout: whatever its solutions expect.
    format: a key of BLOCK_FORMATS, or a dense dtype's name ("bfloat16") when only the order of values is special.
    shape: (N, K), outputs by inputs, as the dequantised weight would have.
    layout: "gguf", or the name a device's `quant.prepare` solution gives to its own order of the bytes.

    Raises ValueError when layout "gguf" and `data` disagree with `format` and `shape`.
    """

    data: torch.Tensor
    format: str
    shape: tuple[int, int]
    layout: str = GGUF_LAYOUT

    def __post_init__(self) -> None:
        if self.layout != GGUF_LAYOUT:
            return
        if self.format not in BLOCK_FORMATS:
            raise ValueError(f"format {self.format!r} is not a packed format; known: {', '.join(BLOCK_FORMATS)}")
        want = (self.shape[0], row_bytes(self.format, self.shape[1]))
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != want:
            raise ValueError(
                f"data of a {self.format} weight {self.shape} must be uint8 {want}, "
                f"got {self.data.dtype} {tuple(self.data.shape)}"
            )


Weight = torch.Tensor | PackedWeight


def row_bytes(format: str, num_values: int) -> int:
    """Bytes of one packed row of `num_values` values; ValueError when they do not fill whole blocks."""
    block = BLOCK_FORMATS[format]
    if num_values % block.num_values:
        raise ValueError(f"a {format} row must be a multiple of {block.num_values} values long, got {num_values}")
    return num_values // block.num_values * block.num_bytes


def weight_traits(weight: Weight) -> tuple[str, str]:
    """(format, layout) as selection sees a weight: ("bfloat16", "rows") for a dense one."""
    if isinstance(weight, torch.Tensor):
        return _DENSE_NAMES[weight.dtype], ROWS_LAYOUT
    return weight.format, weight.layout


_DENSE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint8: "uint8",
}

DENSE_FORMATS = ("float32", "bfloat16", "float16")
