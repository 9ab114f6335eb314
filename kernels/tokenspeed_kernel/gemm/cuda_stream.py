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
from tokenspeed_kernel.gemm.operands import check_operands, dense_traits, even_eights, new_output, pointer
from tokenspeed_kernel.registry import Band, cuda, kernel

MAX_TOKENS = 192
NEEDS = cuda(9, only_major=True, also=fatbin_for("stream_gemm"))
_CORES = 132
_PANEL = 64  # columns of K
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
    ("linear", 1): (Cut(32, 4, 1), Cut(48, 2, 1), Cut(64, 2, 1), Cut(96, 1, 1), Cut(64, 2, 2), Cut(96, 1, 2)),
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
def pick_cut(kind: str, groups: int, rows: int, inputs: int, whole: bool = False) -> Cut:
    """The cut that takes the least time by `cut_us`.

    rows, inputs: of the weight; whole: only cuts in which no blocks share K.
    """
    most = 1 if whole else inputs // (_PANEL * 2)  # a block without any of K would have no sums
    cuts = (cut for cut in CUTS[kind, groups] if cut.split <= max(1, most))
    return min(cuts, key=lambda cut: cut_us(cut, groups, rows, inputs))


def cut_us(cut: Cut, groups: int, rows: int, inputs: int) -> float:
    """About how long a product takes on an H200, fitted to what all cuts were measured to take.

    The machine reads 4.33 MB of weights a microsecond; a core takes in 70 kB of weights, or 150 kB of x, which comes
    from the second-level cache.
    """
    blocks = -(-rows // cut.columns) * cut.split
    rounds = -(-blocks // _CORES)
    per_row = 2 * inputs / cut.split
    machine = rows * 2 * inputs / 4.33e6
    core = rounds * (cut.columns * per_row / 70e3 + 64 * groups * per_row / 150e3)
    both = (machine**4 + core**4) ** 0.25  # the larger, more where they are close
    joins = 2.0 if cut.split == 4 else 0.0
    fills = -0.8 if rounds == 2 and groups == 1 else 1.5 * max(0, rounds - 2)  # a second block fills the first's gaps
    return both + joins + fills + (0.4 if cut.panels == 4 else 0.0)


def shared_bytes(cut: Cut, groups: int, rows: int) -> int:
    """Shared memory of a block: half of a core's where a second one has something to do. rows: of the weight."""
    blocks = -(-rows // cut.columns) * cut.split
    return _HALF_BYTES if groups == 1 and blocks > _CORES else _FULL_BYTES


def stage_bytes(cut: Cut, tokens: int) -> int:
    """What a block copies at once: rows of x in eights, rows of the weight."""
    return cut.panels * (_eights(tokens) + cut.columns) * _PANEL_ROW_BYTES


def num_stages(cut: Cut, tokens: int, shared: int) -> int:
    """Copies that fit into `shared` bytes, less what aligning them takes."""
    return min(_MAX_STAGES, (shared - 1024) // stage_bytes(cut, tokens))


def _eights(tokens: int) -> int:
    return -(-tokens // 8) * 8


def run(
    kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, whole: bool = False
) -> None:
    """Write the product of 1 to `MAX_TOKENS` rows of x to `out`, as `new_output` makes it.

    kind: "linear", "gated" or "logits"; whole: as `pick_cut` takes it.
    """
    check_operands(x, weight, bias)
    (tokens, inputs), rows = x.shape, weight.shape[0]
    groups = num_groups(tokens)
    cut = pick_cut(kind, groups, rows, inputs, whole)
    shared = shared_bytes(cut, groups, rows)
    arguments = (
        swizzled_rows(x, _eights(tokens)),
        swizzled_rows(weight, cut.columns // 2 if kind == "gated" else cut.columns),
        pointer(bias),
        pointer(out),
        _Shape(tokens, out.shape[1], inputs, _eights(tokens), num_stages(cut, tokens, shared)),
    )
    function = f"stream_gemm_{kind}_{groups}_{cut.columns}x{cut.panels}_{cut.split}"
    module = _HALF if shared == _HALF_BYTES else _FULL
    blocks = -(-rows // cut.columns) * cut.split
    module.launch(function, x.device, blocks, 128 * groups + 32, arguments)


def _returning(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = new_output(kind, x, weight)
    run(kind, x, weight, bias, out)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias."""
    return _returning("linear", x, weight, bias)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up over halves of x @ weight.T + bias."""
    return _returning("gated", x, weight, bias)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32."""
    return _returning("logits", x, weight, None)


def _few(tokens: int) -> bool:
    return 0 < tokens <= MAX_TOKENS


def _more_than_skinny_takes(tokens: int) -> bool:
    return 8 < tokens <= 64


def shaped_for_a_stream(tokens: int, outputs: int, inputs: int) -> bool:
    """Where it was measured ahead: the skinny product is, of up to eight rows and small weights.

    Weights of few rows leave most cores without a block; cuBLAS shares K among more.
    """
    return outputs * inputs >= 1 << 24 or (tokens > 8 and outputs >= 1024)


def _register(op: str, fn: Callable[..., torch.Tensor], tokens: Callable[[int], bool]) -> None:
    kernel(
        op, name="cuda_stream", needs=NEEDS, dtypes={torch.bfloat16}, band=Band.SPECIALISED,
        traits=dense_traits(tokens, even_eights), fits=(("tokens", "outputs", "inputs"), shaped_for_a_stream),
    )(fn)  # fmt: skip


_register("gemm.linear", linear, _few)
_register("gemm.linear_silu_and_mul", linear_silu_and_mul, _few)
_register("gemm.logits", logits, _more_than_skinny_takes)
