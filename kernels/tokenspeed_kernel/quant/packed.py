# SPDX-License-Identifier: MIT
"""Packed weights: the block formats we read, and the value that carries packed bytes around.

A packed row is a run of blocks; a block holds a fixed number of values in a fixed number of bytes, scales included,
so rows and runs of whole blocks can be cut out and put together as bytes. GGUF_FORMATS have the byte layouts of the
GGUF specification; SCALED_FORMATS are ours for checkpoints quantized for GPUs: `quant/scaled.py` makes them,
`quant/reference.py` reads both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

BLOCKS_LAYOUT = "blocks"
ROWS_LAYOUT = "rows"
ROUNDED_LAYOUT = "fp8_rows"
"""Of fp8 weights with one scale a row on devices with fp8 matrix units: data e4m3 [N, K], scales float32 [N]."""
SCALED_LAYOUT = "scaled"
"""Of SCALED_FORMATS with `scales` and `zeros` apart, as `scaled.split_blocks` gives them."""


class BlockFormat(NamedTuple):
    """Values and bytes of one block along K."""

    num_values: int
    num_bytes: int


GGUF_FORMATS: dict[str, BlockFormat] = {
    "q4_0": BlockFormat(32, 18),
    "q4_1": BlockFormat(32, 20),
    "q5_0": BlockFormat(32, 22),
    "q5_1": BlockFormat(32, 24),
    "q8_0": BlockFormat(32, 34),
    "q4_k": BlockFormat(256, 144),
    "q5_k": BlockFormat(256, 176),
    "q6_k": BlockFormat(256, 210),
}

# A float32 scale, for int4 a zero point (uint8), then the values: e4m3, int8, or nibbles (the first half of the block
# in the low ones, the second half in the high ones). value = scale * (stored - zero).
SCALED_FORMATS: dict[str, BlockFormat] = {
    "fp8_b32": BlockFormat(32, 4 + 32),
    "fp8_b128": BlockFormat(128, 4 + 128),
    "int8_b32": BlockFormat(32, 4 + 32),
    "int8_b128": BlockFormat(128, 4 + 128),
    "int4_b32": BlockFormat(32, 4 + 1 + 16),
    "int4_b128": BlockFormat(128, 4 + 1 + 64),
}
BLOCK_FORMATS = GGUF_FORMATS | SCALED_FORMATS

ROUNDED_INPUTS = "_a8"
"""What `weight_traits` adds to the format of a weight whose products round their inputs to fp8."""
ROUNDED_FORMATS = tuple(name + ROUNDED_INPUTS for name in SCALED_FORMATS if name.startswith("fp8"))


@dataclass(frozen=True)
class InputRounding:
    """x is rounded to e4m3 before the product: x / scale, with one fixed scale or (None) each token's largest
    magnitude / 448. Only devices with fp8 matrix units do so; `prepare_weight` drops it on the others."""

    scale: float | None


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] whose bytes are not a dense tensor.

    data: the bytes. In layout "blocks": uint8 [N, row_bytes]; in another layout: whatever its solutions expect.
    format: a key of BLOCK_FORMATS, or a dense dtype's name ("bfloat16") when only the order of values is special.
    shape: (N, K), outputs by inputs, as the dequantised weight would have.
    layout: "blocks", or the name a device's `quant.prepare` solution gives to its own order of the bytes.
    scales, zeros: beside `data`, in layouts that keep them apart.
    columns: int64 [K] or None; column i of the weight multiplies input columns[i] (weights sorted by group).
    rounding: how inputs are rounded; None: not at all.

    Raises ValueError when layout "blocks" and `data` disagree with `format` and `shape`.
    """

    data: torch.Tensor
    format: str
    shape: tuple[int, int]
    layout: str = BLOCKS_LAYOUT
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    rounding: InputRounding | None = None

    def __post_init__(self) -> None:
        if self.layout != BLOCKS_LAYOUT:
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
    return weight.format + (ROUNDED_INPUTS if weight.rounding is not None else ""), weight.layout


_DENSE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint8: "uint8",
}

DENSE_FORMATS = ("float32", "bfloat16", "float16")
