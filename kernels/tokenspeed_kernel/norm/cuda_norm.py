# SPDX-License-Identifier: MIT
"""Residual addition and RMSNorm by our CUDA kernel csrc/cuda/add_rms_norm.cu: one launch, 16-byte accesses."""

from __future__ import annotations

import ctypes

import torch

from tokenspeed_kernel.cuda_driver import CudaModule, fatbin_for
from tokenspeed_kernel.registry import Band, cuda, kernel

_MODULE = CudaModule("add_rms_norm")
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_PACK_BYTES = 16
_MAX_THREADS = 1024
_PACKS_PER_THREAD = (1, 2, 4)


def plan(hidden: int, element_size: int) -> tuple[int, int, int]:
    """(packs a thread, threads a block, packs a row) for rows of `hidden`; ValueError when no variant fits.

    Two packs a thread where the row is long enough: more loads in flight, fewer warps to synchronise.
    """
    packs, rest = divmod(hidden * element_size, _PACK_BYTES)
    if rest or not 0 < packs <= _MAX_THREADS * _PACKS_PER_THREAD[-1]:
        raise ValueError(f"rows of {hidden * element_size} bytes must be a multiple of 16 and at most 65536")
    each = next(count for count in _PACKS_PER_THREAD if packs <= (256 if count == 1 else _MAX_THREADS) * count)
    threads = -(-packs // each)
    return each, -(-threads // 32) * 32, packs


def _fits_packs(hidden: int) -> bool:
    return hidden % 8 == 0 and hidden <= 16384


def _add_rms_norm(dtype: torch.dtype) -> None:
    @kernel(
        "norm.add_rms",
        name=f"cuda_{_SUFFIX[dtype]}",
        needs=cuda(8, also=fatbin_for("add_rms_norm")),
        dtypes={dtype},
        traits={"hidden": _fits_packs, "weight_dtype": {dtype}},
        band=Band.NATIVE,
    )
    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, hidden = x.shape
        each, threads, packs = plan(hidden, x.element_size())
        stride = x.stride(0) if rows > 1 else hidden
        if residual.shape != x.shape or not residual.is_contiguous() or x.stride(1) != 1 or not weight.is_contiguous():
            raise ValueError(f"x and contiguous residual [T, H] expected, got {x.shape} and {residual.shape}")
        if stride * x.element_size() % _PACK_BYTES or any(t.data_ptr() % _PACK_BYTES for t in (x, residual, weight)):
            raise ValueError("rows of x, residual and weight must begin at multiples of 16 bytes")
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        if rows:
            arguments = (
                *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, residual, weight, out)),
                ctypes.c_int64(stride),
                ctypes.c_int(packs),
                ctypes.c_float(1.0 / hidden),
                ctypes.c_float(eps),
            )
            _MODULE.launch(f"add_rms_norm_{_SUFFIX[dtype]}_{each}", x.device, rows, threads, arguments)
        return out, residual


for _dtype in _SUFFIX:
    _add_rms_norm(_dtype)
