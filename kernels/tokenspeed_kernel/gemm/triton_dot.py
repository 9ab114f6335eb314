# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""The product of two tiles in Triton, as every kernel that has one computes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b on the matrix units; the interpreter cannot multiply bfloat16, so there it is widened first."""
    if PRECISION == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


def precision_of(x: torch.Tensor) -> str:
    """What `dot` is told of tiles of `x`."""
    if x.dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return "interpreted"
    return "ieee" if x.dtype == torch.float32 else "tf32"
