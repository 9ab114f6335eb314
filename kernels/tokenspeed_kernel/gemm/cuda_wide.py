# SPDX-License-Identifier: MIT
"""Products with many rows of x on Hopper by our CUDA kernel csrc/cuda/wide_gemm.cu, plain or as silu(gate) * up."""

from __future__ import annotations

import ctypes

import torch

from tokenspeed_kernel.cuda_driver import CudaModule, fatbin_for, swizzled_rows
from tokenspeed_kernel.gemm.cuda_stream import MAX_TOKENS
from tokenspeed_kernel.gemm.operands import check_operands, dense_traits, even_eights, new_output, pointer
from tokenspeed_kernel.registry import Band, cuda, kernel

NEEDS = cuda(9, only_major=True, also=fatbin_for("wide_gemm"))
TILE_ROWS, TILE_COLUMNS = 256, 192
_CORES = 132
_THREADS = 384
_BAND = 8  # tiles of x, whose rows the tiles that run together read
_MODULE = CudaModule("wide_gemm", 4 * (TILE_ROWS + TILE_COLUMNS) * 128 + 1024)


class _Shape(ctypes.Structure):
    """WideShape of wide_gemm.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("tokens", "outputs", "inputs", "band"))


def pairs_of_tiles(tokens: int, rows: int) -> int:
    """Pairs that share rows of x; rows: of the weight."""
    return -(-tokens // TILE_ROWS) * -(-rows // (2 * TILE_COLUMNS))


def _rounds(tokens: int, rows: int) -> int:
    return -(-pairs_of_tiles(tokens, rows) // (_CORES // 2))


def share_used(tokens: int, rows: int) -> float:
    """How much of what the cores multiply, while the longest of them works, is asked for. rows: of the weight."""
    return tokens * rows / (_rounds(tokens, rows) * _CORES * TILE_ROWS * TILE_COLUMNS)


def wide_us(tokens: int, rows: int, inputs: int) -> float:
    """About how long a product takes on an H200. rows, inputs: of the weight."""
    return _rounds(tokens, rows) * inputs * 0.0142


def run(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of any number of rows of x. kind: "linear", "gated" or "logits"."""
    check_operands(x, weight, bias)
    (tokens, inputs), rows = x.shape, weight.shape[0]
    out = new_output(kind, x, weight)
    arguments = (
        swizzled_rows(x, TILE_ROWS // 2),
        swizzled_rows(weight, TILE_COLUMNS // 2 if kind == "gated" else TILE_COLUMNS),
        pointer(bias),
        pointer(out),
        _Shape(tokens, out.shape[1], inputs, _BAND),
    )
    cores = torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks = 2 * min(pairs_of_tiles(tokens, rows), cores // 2)
    _MODULE.launch(f"wide_gemm_{kind}", x.device, blocks, _THREADS, arguments)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias."""
    return run("linear", x, weight, bias)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up over halves of x @ weight.T + bias."""
    return run("gated", x, weight, bias)


def _many(tokens: int) -> bool:
    return tokens > MAX_TOKENS


def shaped_to_fill_the_cores(tokens: int, outputs: int) -> bool:
    """Where cuBLAS, whose tiles come in many shapes, was measured slower."""
    return share_used(tokens, outputs) >= 0.93


def shaped_to_nearly_fill_the_cores(tokens: int, outputs: int) -> bool:
    """As above; cuBLAS needs one more kernel for the activation."""
    return share_used(tokens, outputs) >= 0.87


kernel(
    "gemm.linear", name="cuda_wide", needs=NEEDS, dtypes={torch.bfloat16}, band=Band.SPECIALISED,
    traits=dense_traits(_many), fits=(("tokens", "outputs"), shaped_to_fill_the_cores),
)(linear)  # fmt: skip
kernel(
    "gemm.linear_silu_and_mul", name="cuda_wide", needs=NEEDS, dtypes={torch.bfloat16}, band=Band.SPECIALISED,
    traits=dense_traits(_many, even_eights), fits=(("tokens", "outputs"), shaped_to_nearly_fill_the_cores),
)(linear_silu_and_mul)  # fmt: skip
