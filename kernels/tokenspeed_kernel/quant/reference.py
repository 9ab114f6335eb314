# SPDX-License-Identifier: MIT
"""Dequantisation of the block formats in plain torch, and the preparation that changes nothing.

Byte layouts and the order of the float32 operations follow the GGUF specification, so results equal those of the
`gguf` package bit for bit. q4_0 .. q8_0 have one scale for 32 values; q4_k .. q6_k have sub-blocks within 256.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tokenspeed_kernel.quant.packed import BLOCK_FORMATS, BLOCKS_LAYOUT, PackedWeight, Weight
from tokenspeed_kernel.registry import Band, anywhere, kernel


def dequantize(weight: PackedWeight) -> torch.Tensor:
    """The dense float32 [N, K] values of a weight in layout "blocks"; ValueError for another layout."""
    if weight.layout != BLOCKS_LAYOUT:
        raise ValueError(f"cannot dequantise layout {weight.layout!r}, only {BLOCKS_LAYOUT!r}")
    return dequantize_rows(weight.data, weight.format)


def dequantize_rows(data: torch.Tensor, format: str) -> torch.Tensor:
    """uint8 [R, row_bytes] in blocks to float32 [R, K]."""
    blocks = data.reshape(-1, BLOCK_FORMATS[format].num_bytes)
    return _UNPACK[format](blocks).reshape(data.shape[0], -1)


@kernel(
    "quant.prepare",
    name="reference",
    needs=anywhere(),
    dtypes={torch.float32, torch.bfloat16, torch.float16, torch.uint8},
    band=Band.REFERENCE,
)
def prepare(weight: Weight, device: torch.device, dtype: torch.dtype) -> Weight:
    """Move the weight to the device as it is."""
    if isinstance(weight, torch.Tensor):
        return weight.to(device).contiguous()
    columns = None if weight.columns is None else weight.columns.to(device)
    return replace(weight, data=weight.data.to(device).contiguous(), columns=columns)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 stored at byte `at` of every block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low nibbles of every byte, then high nibbles: [blocks, n] to [blocks, 2n]."""
    return torch.cat([packed & 0x0F, packed >> 4], dim=1)


def _high_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The 32 bits of the little-endian word at byte `at`, each as a fifth bit (0 or 16): [blocks, 32]."""
    shifts = torch.arange(8, device=blocks.device)
    bits = (blocks[:, at : at + 4, None].int() >> shifts) & 1
    return bits.reshape(-1, 32) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[:, 6:]).int() | _high_bits(blocks, 2)
    return _half(blocks, 0) * (values - 16).float()


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[:, 8:]).int() | _high_bits(blocks, 4)
    return _half(blocks, 0) * values.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit scales and eight 6-bit minima of a k-block's 12 bytes, each [blocks, 8]."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1)
    mins = torch.cat([mid & 63, (high >> 4) | ((mid >> 6) << 4)], dim=1)
    return scales.float(), mins.float()


def _k_values(blocks: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    """Values scale * quant - min of the eight sub-blocks of 32: quants [blocks, 8, 32] to float32 of the same shape."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales)[:, :, None]
    minimum = (_half(blocks, 2) * mins)[:, :, None]
    return scale * quants.float() - minimum


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """128 bytes as 8 sub-blocks: 32 bytes carry one sub-block in their low nibbles and the next in their high."""
    groups = packed.reshape(-1, 4, 32)
    return torch.stack([groups & 0x0F, groups >> 4], dim=2).reshape(-1, 8, 32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_values(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, device=blocks.device)[:, None]
    fifth = (blocks[:, 16:48].int()[:, None, :] >> shifts) & 1
    return _k_values(blocks, _k_nibbles(blocks[:, 48:]).int() | (fifth << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low4 = torch.cat([low & 0x0F, low >> 4], dim=2).int()
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device)[:, None]
    values = (low4 | (((high.int() >> shifts) & 3) << 4)) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    scale = (_half(blocks, 208) * scales)[:, :, None]
    return scale * values.reshape(-1, 16, 16).float()


def _fp8(blocks: torch.Tensor) -> torch.Tensor:
    return _scale(blocks) * blocks[:, 4:].contiguous().view(torch.float8_e4m3fn).float()


def _int8(blocks: torch.Tensor) -> torch.Tensor:
    return _scale(blocks) * blocks[:, 4:].contiguous().view(torch.int8).float()


def _int4(blocks: torch.Tensor) -> torch.Tensor:
    return _scale(blocks) * (_nibbles(blocks[:, 5:]).float() - blocks[:, 4:5].float())


def _scale(blocks: torch.Tensor) -> torch.Tensor:
    """The float32 stored first in every block, [blocks, 1]."""
    return blocks[:, :4].contiguous().view(torch.float32)


_UNPACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "fp8_b32": _fp8,
    "fp8_b128": _fp8,
    "int8_b32": _int8,
    "int8_b128": _int8,
    "int4_b32": _int4,
    "int4_b128": _int4,
}
