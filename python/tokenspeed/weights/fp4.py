# SPDX-License-Identifier: MIT
"""Decoding of 4-bit floats (e2m1) with block scales, for devices that cannot multiply them.

mxfp4 has one power of two (e8m0) for 32 values (OCP Microscaling Formats, 2023); nvfp4 one e4m3 number for 16 values
and one float for the tensor. Two values share a byte, the first in the low nibble. Pure functions on CPU tensors.
"""

from __future__ import annotations

import torch

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLE = torch.tensor(_VALUES + tuple(-value for value in _VALUES))


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] to float32 [..., K]."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return _TABLE[codes.int()]


def decode_mxfp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """packed: uint8 [..., K / 2]; exponents: uint8 [..., K / 32], biased by 127. bfloat16 [..., K], exact."""
    values = unpack(packed).unflatten(-1, (-1, 32))
    return torch.ldexp(values, (exponents.int() - 127).unsqueeze(-1)).flatten(-2).bfloat16()


def decode_nvfp4(packed: torch.Tensor, scales: torch.Tensor, tensor_scale: float) -> torch.Tensor:
    """packed: uint8 [N, K / 2]; scales: float8_e4m3fn [N, K / 16]; tensor_scale multiplies. bfloat16 [N, K]."""
    values = unpack(packed).unflatten(-1, (-1, 16))
    return (values * (scales.float() * tensor_scale).unsqueeze(-1)).flatten(-2).bfloat16()
