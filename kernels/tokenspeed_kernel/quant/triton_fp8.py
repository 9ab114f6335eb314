# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Rounding in Triton by bit operations: e4m3 as bytes, since GPUs before 8.9 and the interpreter have no such type.

Called by kernels of other families. Reading gives the exact value; writing rounds to nearest, ties to even, at most
448, and keeps NaN, as torch does after a clamp.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_fp8(code):
    """uint8 codes as float32: their bits are those of a half float whose bias is larger by 8. NaN reads as 480."""
    wide = code.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def to_fp8(value):
    """float32 as uint8 codes."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(value), 448.0)
    # Below 2^-6 a code is a whole number of 2^-9, which the addition rounds to.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    size_bits = size.to(tl.int32, bitcast=True)
    large = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960
    code = tl.where(size < 0.015625, small, large)
    code = tl.where(value != value, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def round_to(value, DTYPE: tl.constexpr):
    """float32 to DTYPE, ties to even. The interpreter cuts bfloat16 off instead, so here it finds nothing to cut."""
    if tl.bfloat16 == DTYPE:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, nearest, bits).to(tl.float32, bitcast=True)
    return value.to(DTYPE)
