# SPDX-License-Identifier: MIT
"""Products with few rows of x by our CUDA kernel csrc/cuda/skinny_gemm.cu: one launch, the weight read once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from tokenspeed_kernel.cuda_driver import CudaModule, fatbin_for
from tokenspeed_kernel.quant.packed import ROWS_LAYOUT
from tokenspeed_kernel.registry import Band, cuda, kernel

Rule = Iterable[Hashable] | Callable[[Any], bool]

# As much as decode attention asks for: a core that is cut anew must be empty first.
_MODULE = CudaModule("skinny_gemm", shared_percent=40)
_SUFFIX = {torch.bfloat16: "bf16", torch.float16: "f16"}
_NEEDS = cuda(8, also=fatbin_for("skinny_gemm"))
_MAX_TOKENS = 8
_MAX_WARPS = 8
_CHUNK = 128
_DEEP_INPUTS = 2 * _MAX_WARPS * _CHUNK
_FEW_OUTPUTS = 4224
_MANY_OUTPUTS = 32768


def num_warps(num_outputs: int, num_inputs: int) -> int:
    """Warps of a block: as many as there are chunks of K, at most eight, or four where blocks queue up anyway."""
    most = _MAX_WARPS // 2 if num_outputs > _MANY_OUTPUTS else _MAX_WARPS
    return min(most, -(-num_inputs // _CHUNK))


def owned_rows(num_outputs: int, num_inputs: int) -> str:
    """Rows of the weight that a block owns: eight where blocks of sixteen would be few for the cores.

    "deep": eight, of which twice as much is on its way before the kernel ahead has ended, where every warp has that.
    """
    if num_outputs > _FEW_OUTPUTS:
        return "sixteen"
    return "deep" if num_inputs >= _DEEP_INPUTS else "eight"


def _few(tokens: int) -> bool:
    return 0 < tokens <= _MAX_TOKENS


def _whole_packs(inputs: int) -> bool:
    return inputs % 8 == 0 and inputs > 0


def _even_eights(outputs: int) -> bool:
    return outputs % 16 == 0


def _run(
    variant: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, blocks: int
) -> torch.Tensor:
    tokens, inputs = x.shape
    stride = x.stride(0) if tokens > 1 else inputs
    if x.stride(1) != 1 or stride % 8 or weight.shape[1] != inputs or not weight.is_contiguous():
        raise ValueError(f"x [T, K] with rows of whole 16 bytes and contiguous weight [N, K] expected, got {x.shape}")
    if x.data_ptr() % 16 or weight.data_ptr() % 16 or (bias is not None and not bias.is_contiguous()):
        raise ValueError("x and weight must begin at multiples of 16 bytes, bias must be contiguous")
    arguments = (
        *(ctypes.c_void_p(None if part is None else part.data_ptr()) for part in (x, weight, bias, out)),
        *(ctypes.c_int(size) for size in (tokens, out.shape[1], inputs)),
        ctypes.c_int64(stride),
    )
    function = f"skinny_gemm_{_SUFFIX[x.dtype]}_{variant}"
    _MODULE.launch(function, x.device, blocks, 32 * num_warps(out.shape[1], inputs), arguments)
    return out


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outputs, inputs = weight.shape
    variant = owned_rows(outputs, inputs)
    out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
    return _run(variant, x, weight, bias, out, -(-outputs // (16 if variant == "sixteen" else 8)))


def _linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    inner = weight.shape[0] // 2
    out = torch.empty(x.shape[0], inner, dtype=x.dtype, device=x.device)
    return _run("gated", x, weight, bias, out, -(-inner // 8))


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outputs = weight.shape[0]
    variant = "eight" if outputs <= _FEW_OUTPUTS else "sixteen"
    out = torch.empty(x.shape[0], outputs, dtype=torch.float32, device=x.device)
    return _run(f"f32_{variant}", x, weight, None, out, -(-outputs // (8 if variant == "eight" else 16)))


def _register(dtype: torch.dtype) -> None:
    traits: dict[str, Rule] = {
        "weight_format": {str(dtype).removeprefix("torch.")},
        "weight_layout": {ROWS_LAYOUT},
        "tokens": _few,
        "inputs": _whole_packs,
    }
    name = f"cuda_{_SUFFIX[dtype]}"
    gated: dict[str, Rule] = {**traits, "outputs": _even_eights}
    kernel("gemm.linear", name=name, needs=_NEEDS, dtypes={dtype}, traits=traits, band=Band.NATIVE)(_linear)
    kernel("gemm.logits", name=name, needs=_NEEDS, dtypes={dtype}, traits=traits, band=Band.NATIVE)(_logits)
    kernel("gemm.linear_silu_and_mul", name=name, needs=_NEEDS, dtypes={dtype}, traits=gated, band=Band.NATIVE)(
        _linear_silu_and_mul
    )


for _dtype in _SUFFIX:
    _register(_dtype)
