# SPDX-License-Identifier: MIT
"""Products with few rows of x on Hopper by our CUDA kernel csrc/cuda/stream_gemm.cu: the weight streams once.

How a product is cut depends on the weight's shape and on how many 64 rows of x there are. Where the blocks of a
cluster share K, an output is a sum of partial sums, so its bits depend on the cut; `invariant` solutions take only
cuts that do not, and an output is then one sum over K in order, whatever else is in the batch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tokenspeed_kernel.cuda_driver import CudaModule, fatbin_for, swizzled_rows
from tokenspeed_kernel.gemm.operands import check_operands, dense_traits, pointer
from tokenspeed_kernel.registry import Band, cuda, kernel

MAX_TOKENS = 192
NEEDS = cuda(9, only_major=True, also=fatbin_for("stream_gemm"))
_CORES = 132
_PANEL_ROW_BYTES = 128
_MAX_STAGES = 32
_FULL_BYTES = 220 << 10  # a core's, for a product of one block a core
_HALF_BYTES = 108 << 10
_FULL, _HALF = CudaModule("stream_gemm", _FULL_BYTES), CudaModule("stream_gemm", _HALF_BYTES)


class Cut(NamedTuple):
    """How a product is cut. columns: rows of the weight of a block, of gate and up together where gated.

    panels: pieces of 64 columns of K that a block copies at once; split: blocks of a cluster that share K.
    """

    columns: int
    panels: int
    split: int


# What stream_gemm.cu compiles, by kind and number of warpgroups.
CUTS: dict[tuple[str, int], tuple[Cut, ...]] = {
    ("linear", 1): (Cut(32, 4, 1), Cut(48, 2, 1), Cut(64, 2, 1), Cut(96, 1, 1), Cut(64, 2, 2), Cut(96, 1, 2), Cut(32, 2, 4)),
    ("linear", 2): (Cut(32, 2, 1), Cut(64, 1, 1), Cut(128, 1, 1), Cut(64, 1, 2), Cut(96, 1, 2), Cut(64, 1, 4)),
    ("linear", 3): (Cut(64, 1, 1), Cut(128, 1, 1), Cut(64, 1, 2), Cut(96, 1, 2), Cut(64, 1, 4)),
    ("gated", 1): (Cut(64, 1, 1), Cut(96, 1, 1), Cut(192, 1, 1)),
    ("gated", 2): (Cut(96, 1, 1), Cut(192, 1, 1)),
    ("gated", 3): (Cut(96, 1, 1), Cut(192, 1, 1)),
    ("logits", 1): (Cut(64, 1, 1), Cut(192, 1, 1)),
    ("logits", 2): (Cut(128, 1, 1),),
    ("logits", 3): (Cut(128, 1, 1),),
}


class _Shape(ctypes.Structure):
    """StreamShape of stream_gemm.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("tokens", "outputs", "inputs", "x_rows", "stages"))


def num_groups(tokens: int) -> int:
    """Warpgroups that multiply, each with 64 rows of x."""
    return -(-tokens // 64)


@functools.cache
def pick_cut(kind: str, groups: int, rows: int, whole: bool = False) -> Cut:
    """The cut with which the cores are done first, as measured on an H200.

    rows: of the weight; whole: only cuts in which no blocks share K.
    """

    def cost(cut: Cut) -> float:
        blocks = -(-rows // cut.columns) * cut.split
        # Rows of x come from the second-level cache, some five times as fast as rows of the weight from memory.
        each = (cut.columns + 0.2 * 64 * groups) / cut.split + (3 if cut.split > 1 else 0)
        rounds = -(-blocks // _CORES)
        return rounds * each * (0.95 if rounds > 1 else 1.0)  # a second block fills the first one's gaps

    return min((cut for cut in CUTS[kind, groups] if not whole or cut.split == 1), key=cost)


def _run(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, whole: bool) -> torch.Tensor:
    check_operands(x, weight, bias)
    (tokens, inputs), rows = x.shape, weight.shape[0]
    gated = kind == "gated"
    groups = num_groups(tokens)
    cut = pick_cut(kind, groups, rows, whole)
    outputs = rows // 2 if gated else rows
    out = torch.empty(tokens, outputs, dtype=torch.float32 if kind == "logits" else x.dtype, device=x.device)
    x_rows = -(-tokens // 8) * 8
    blocks = -(-rows // cut.columns) * cut.split
    shared = _HALF_BYTES if groups == 1 and blocks > _CORES else _FULL_BYTES
    stages = min(_MAX_STAGES, (shared - 1024) // (cut.panels * (x_rows + cut.columns) * _PANEL_ROW_BYTES))
    arguments = (
        swizzled_rows(x, x_rows),
        swizzled_rows(weight, cut.columns // 2 if gated else cut.columns),
        pointer(bias),
        pointer(out),
        _Shape(tokens, outputs, inputs, x_rows, stages),
    )
    function = f"stream_gemm_{kind}_{groups}_{cut.columns}x{cut.panels}_{cut.split}"
    module = _HALF if shared == _HALF_BYTES else _FULL
    module.launch(function, x.device, blocks, 128 * groups + 32, arguments)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, whole: bool = False) -> torch.Tensor:
    """x @ weight.T + bias for 1 to `MAX_TOKENS` rows of x; whole: as `pick_cut` takes it."""
    return _run("linear", x, weight, bias, whole)


def linear_silu_and_mul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, whole: bool = False
) -> torch.Tensor:
    """silu(gate) * up for 1 to `MAX_TOKENS` rows of x; whole: as `pick_cut` takes it."""
    return _run("gated", x, weight, bias, whole)


def logits(x: torch.Tensor, weight: torch.Tensor, whole: bool = False) -> torch.Tensor:
    """x @ weight.T in float32 for 1 to `MAX_TOKENS` rows of x; whole: as `pick_cut` takes it."""
    return _run("logits", x, weight, None, whole)


def _few(tokens: int) -> bool:
    return 0 < tokens <= MAX_TOKENS


def _more_than_skinny_takes(tokens: int) -> bool:
    return 8 < tokens <= 64


def _many_enough(outputs: int) -> bool:
    # Below, the skinny product and cuBLAS have more blocks than this one.
    return outputs % 16 == 0 and outputs >= 4096


def _register(op: str, fn: Callable[..., torch.Tensor], tokens: Callable[[int], bool]) -> None:
    traits = dense_traits(tokens, _many_enough)
    kernel(op, name="cuda_stream", needs=NEEDS, dtypes={torch.bfloat16}, traits=traits, band=Band.SPECIALISED)(fn)


_register("gemm.linear", linear, _few)
_register("gemm.linear_silu_and_mul", linear_silu_and_mul, _few)
_register("gemm.logits", logits, _more_than_skinny_takes)
