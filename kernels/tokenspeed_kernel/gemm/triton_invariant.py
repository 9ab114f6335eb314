# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Dense products in Triton whose rows do not depend on each other, to the bit: for `--deterministic`.

Every output is one sum over K, taken in the same steps of sixteen by the same instruction whatever tile it lies in: no
tile cuts K, and all have 64 rows or a multiple, which the matrix units take in instructions of 64. So the tile may be
chosen by the number of rows, and `tools/bench/deterministic_check.py` holds that on the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.gemm.triton_dot import dot, precision_of
from tokenspeed_kernel.quant.packed import ROWS_LAYOUT
from tokenspeed_kernel.registry import Band, cuda, kernel

_TILES_IN_A_ROW = 8
_FEW_OUTPUTS = 8192


class Tile(NamedTuple):
    """Of how many tokens, outputs and inputs a program's piece is, and how it runs."""

    tokens: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


_WIDE = Tile(64, 64, 32, 4, 2)
"""For float32, which the matrix units do not take."""
_LARGE = Tile(128, 256, 64, 8, 3)
_MIDDLE = Tile(128, 128, 64, 8, 4)
_FEW = Tile(64, 64, 128, 4, 4)
_FEW_NARROW = Tile(64, 32, 128, 4, 5)
"""Where tiles of 64 outputs would be too few for the cores."""


def tile_for(num_tokens: int, num_outputs: int, dtype: torch.dtype) -> Tile:
    """The tile that is fastest for so many rows; none changes a bit of them."""
    if dtype == torch.float32:
        return _WIDE
    if num_tokens > 64:
        return _LARGE if num_tokens > 512 else _MIDDLE
    return _FEW_NARROW if num_outputs <= _FEW_OUTPUTS else _FEW


@triton.jit(do_not_specialize=["num_tokens"])
def invariant_linear_kernel(
    x, weight, bias, out, num_tokens, num_outputs, num_inputs, stride_x, stride_out, head_x, head_out,
    BIASED: tl.constexpr, WHOLE_K: tl.constexpr, TILE_T: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    IN_A_ROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of out = x @ weight.T + bias, of one head where there are several: heads of x and out lie head_x and
    head_out apart, their weights on top of each other. Tiles of the same outputs follow each other: they share weights.
    """
    head = tl.program_id(1).to(tl.int64)
    tiles_t = tl.cdiv(num_tokens, TILE_T)
    tiles_n = tl.cdiv(num_outputs, TILE_N)
    strip = tl.program_id(0) // (IN_A_ROW * tiles_n)
    height = tl.minimum(tiles_t - strip * IN_A_ROW, IN_A_ROW)
    rest = tl.program_id(0) % (IN_A_ROW * tiles_n)
    token = ((strip * IN_A_ROW + rest % height) * TILE_T + tl.arange(0, TILE_T)).to(tl.int64)
    row = (rest // height * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    here, mine = token < num_tokens, row < num_outputs
    k = tl.arange(0, TILE_K)
    x_at = x + head * head_x + token[:, None] * stride_x + k[None, :]
    weight_at = weight + (head * num_outputs + row)[None, :] * num_inputs + k[:, None]
    acc = tl.zeros([TILE_T, TILE_N], tl.float32)
    for start in range(0, num_inputs, TILE_K):
        if WHOLE_K:
            left = tl.load(x_at + start, mask=here[:, None], other=0.0)
            right = tl.load(weight_at + start, mask=mine[None, :], other=0.0)
        else:
            known = start + k < num_inputs
            left = tl.load(x_at + start, mask=here[:, None] & known[None, :], other=0.0)
            right = tl.load(weight_at + start, mask=mine[None, :] & known[:, None], other=0.0)
        acc = dot(left, right, acc, PRECISION)
    if BIASED:
        acc += tl.load(bias + row, mask=mine, other=0.0).to(tl.float32)[None, :]
    place = out + head * head_out + token[:, None] * stride_out + row[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=here[:, None] & mine[None, :])


def _run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    num_tokens, num_inputs = x.shape
    if weight.shape[1] != num_inputs or not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        raise ValueError(f"x [T, K] and contiguous weight [N, K] expected, got {x.shape} and {weight.shape}")
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((num_tokens, weight.shape[0]), dtype=dtype, device=x.device)
    # A lone row's stride says nothing; a kernel would be compiled for it.
    stride = x.stride(0) if num_tokens > 1 else num_inputs
    _launch(x, weight, bias, out, (weight.shape[0], 1), (stride, weight.shape[0], 0, 0))
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    outputs_and_heads: tuple[int, int],
    strides: tuple[int, int, int, int],
) -> None:
    """strides: of x and out between tokens, then between heads."""
    num_tokens, num_inputs = x.shape[0], weight.shape[1]
    num_outputs, num_heads = outputs_and_heads
    if num_tokens == 0:
        return
    tile = tile_for(num_tokens, num_outputs, x.dtype)
    grid = (triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_outputs, tile.outputs), num_heads)
    invariant_linear_kernel[grid](
        x, weight, x if bias is None else bias, out, num_tokens, num_outputs, num_inputs, *strides,
        BIASED=bias is not None, WHOLE_K=num_inputs % tile.inputs == 0,
        TILE_T=tile.tokens, TILE_N=tile.outputs, TILE_K=tile.inputs,
        IN_A_ROW=_TILES_IN_A_ROW, PRECISION=precision_of(x), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One launch."""
    return _run(x, weight, bias, x.dtype)


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One launch, its sums as they are."""
    return _run(x, weight, None, torch.float32)


def _heads(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """One launch for all heads."""
    num_heads, num_outputs = out.shape[1:]
    if x.shape[:2] != out.shape[:2] or weight.shape != (num_heads * num_outputs, x.shape[2]):
        raise ValueError(
            f"x [T, H, K], weight [H * N, K] and out [T, H, N], got {x.shape}, {weight.shape}, {out.shape}"
        )
    if x.stride(2) != 1 or out.stride(2) != 1 or not weight.is_contiguous():
        raise ValueError("a head's elements must be adjacent, the weight contiguous")
    one = x.shape[0] == 1
    between_tokens = (x.stride(1) * num_heads, out.stride(1) * num_heads) if one else (x.stride(0), out.stride(0))
    _launch(x, weight, None, out, (num_outputs, num_heads), (*between_tokens, x.stride(1), out.stride(1)))


for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    _name = str(_dtype).removeprefix("torch.")
    for _op, _fn in (("gemm.linear", _linear), ("gemm.logits", _logits), ("gemm.heads", _heads)):
        kernel(
            _op,
            name=f"triton_invariant_{_name}",
            needs=cuda(8),
            dtypes={_dtype},
            traits={"weight_format": {_name}, "weight_layout": {ROWS_LAYOUT}},
            band=Band.PORTABLE,
            priority=-20,
            batch_invariant=True,
        )(_fn)
