# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Linear layers and embeddings in Triton on weights that stay in eight or four bits (layout "scaled").

Values become the activations' dtype in registers, exactly: e4m3, int8 and int4 minus its zero fit in bfloat16. A
block's product is scaled in float32, so nothing is rounded but the activations themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.gemm.triton_dot import dot, precision_of
from tokenspeed_kernel.quant.packed import SCALED_FORMATS, SCALED_LAYOUT, PackedWeight
from tokenspeed_kernel.quant.triton_fp8 import from_fp8, round_to
from tokenspeed_kernel.registry import Band, cuda, kernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TRAITS = {"weight_format": SCALED_FORMATS, "weight_layout": (SCALED_LAYOUT,)}
_MOST_TOKENS = 64
"""Of a tile."""


@triton.jit
def scaled_linear_kernel(
    x, values, scales, zeros, bias, out, num_tokens, num_rows, num_columns, stride_x,
    KIND: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, TILE_T: tl.constexpr, TILE_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """TILE_T tokens by TILE_N outputs, block after block along K."""
    token = tl.program_id(1).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    row = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    here, mine = token < num_tokens, row < num_rows
    num_blocks = num_columns // BLOCK
    acc = tl.zeros([TILE_T, TILE_N], tl.float32)
    for block in range(num_blocks):
        scale = tl.load(scales + row * num_blocks + block, mask=mine, other=0.0)
        inputs = x + token[:, None] * stride_x + block * BLOCK
        product = tl.zeros([TILE_T, TILE_N], tl.float32)
        if KIND == "int4":
            column = tl.arange(0, BLOCK // 2)
            zero = tl.load(zeros + row * num_blocks + block, mask=mine, other=0).to(tl.float32)
            at = values + row[:, None] * (num_columns // 2) + block * (BLOCK // 2) + column[None, :]
            pair = tl.load(at, mask=mine[:, None], other=0)
            first = tl.load(inputs + column[None, :], mask=here[:, None], other=0.0)
            second = tl.load(inputs + BLOCK // 2 + column[None, :], mask=here[:, None], other=0.0)
            low = ((pair & 15).to(tl.float32) - zero[:, None]).to(first.dtype)
            high = ((pair >> 4).to(tl.float32) - zero[:, None]).to(first.dtype)
            product = dot(first, tl.trans(low), product, PRECISION)
            product = dot(second, tl.trans(high), product, PRECISION)
        else:
            column = tl.arange(0, BLOCK)
            code = tl.load(
                values + row[:, None] * num_columns + block * BLOCK + column[None, :], mask=mine[:, None], other=0
            )
            tile = tl.load(inputs + column[None, :], mask=here[:, None], other=0.0)
            if KIND == "fp8":
                weight = from_fp8(code)
            else:
                weight = code.to(tl.int8, bitcast=True).to(tl.float32)
            product = dot(tile, tl.trans(weight.to(tile.dtype)), product, PRECISION)
        acc += product * scale[None, :]
    if BIASED:
        acc += tl.load(bias + row, mask=mine, other=0.0).to(tl.float32)[None, :]
    place = out + token[:, None] * num_rows + row[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=here[:, None] & mine[None, :])


@triton.jit
def scaled_embedding_kernel(
    token_ids, values, scales, zeros, out, num_columns, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of one token's row."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(token_ids + token).to(tl.int64)
    num_blocks = num_columns // BLOCK
    scale = tl.load(scales + row * num_blocks + block)
    column = tl.arange(0, BLOCK)
    if KIND == "int4":
        half: tl.constexpr = BLOCK // 2
        pair = tl.load(values + row * (num_columns // 2) + block * half + column % half).to(tl.int32)
        zero = tl.load(zeros + row * num_blocks + block).to(tl.float32)
        value = ((pair >> (column // half * 4)) & 15).to(tl.float32) - zero
    else:
        code = tl.load(values + row * num_columns + block * BLOCK + column)
        if KIND == "fp8":
            value = from_fp8(code)
        else:
            value = code.to(tl.int8, bitcast=True).to(tl.float32)
    place = out + token * num_columns + block * BLOCK + column
    tl.store(place, round_to(value * scale, out.dtype.element_ty))


@kernel("gemm.linear", name="triton_scaled", needs=cuda(8), dtypes=_FLOATS, traits=_TRAITS, band=Band.PORTABLE)
def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """One launch. ValueError when shapes disagree."""
    return _linear(x, weight, bias, min(_MOST_TOKENS, max(16, triton.next_power_of_2(x.shape[0]))))


@kernel(
    "gemm.linear",
    name="triton_scaled_invariant",
    needs=cuda(8),
    dtypes=_FLOATS,
    traits=_TRAITS,
    band=Band.PORTABLE,
    priority=-1,
    batch_invariant=True,
)
def invariant_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same in tiles of one size, so that the matrix units sum a row in one way."""
    return _linear(x, weight, bias, _MOST_TOKENS)


def _linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, tile_t: int) -> torch.Tensor:
    num_tokens, num_columns = x.shape
    if num_columns != weight.shape[1]:
        raise ValueError(f"x has {num_columns} columns, the weight {weight.shape} needs {weight.shape[1]}")
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows = weight.shape[0]
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    kind, block = _kind(weight)
    tile_n = 64 if tile_t == _MOST_TOKENS else 32
    grid = (triton.cdiv(num_rows, tile_n), triton.cdiv(num_tokens, tile_t))
    zeros = weight.data if weight.zeros is None else weight.zeros
    scaled_linear_kernel[grid](
        x, weight.data, weight.scales, zeros, x if bias is None else bias, out,
        num_tokens, num_rows, num_columns, x.stride(0),
        KIND=kind, BIASED=bias is not None, BLOCK=block, TILE_T=tile_t, TILE_N=tile_n, PRECISION=precision_of(x),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@kernel("gemm.embedding", name="triton_scaled", needs=cuda(8), dtypes=_FLOATS, traits=_TRAITS, band=Band.PORTABLE)
def embedding(token_ids: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """One launch, a program a block of a row."""
    num_tokens, num_columns = token_ids.shape[0], weight.shape[1]
    out = torch.empty((num_tokens, num_columns), dtype=dtype, device=token_ids.device)
    kind, block = _kind(weight)
    zeros = weight.data if weight.zeros is None else weight.zeros
    if num_tokens:
        scaled_embedding_kernel[(num_tokens, num_columns // block)](
            token_ids, weight.data, weight.scales, zeros, out, num_columns, KIND=kind, BLOCK=block, num_warps=1
        )
    return out


def _kind(weight: PackedWeight) -> tuple[str, int]:
    """ "fp8", "int8" or "int4", and the values of a block."""
    return weight.format.split("_")[0], SCALED_FORMATS[weight.format].num_values
