# SPDX-License-Identifier: MIT
"""Seeded sampling by our CUDA kernel csrc/cuda/sample.cu: one launch, whatever the settings of the rows."""

from __future__ import annotations

import ctypes

import torch

from tokenspeed_kernel.cuda_driver import CudaModule, fatbin_for
from tokenspeed_kernel.registry import Band, cuda, kernel

_MODULE = CudaModule("sample")
_THREADS = 512
_DTYPES = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)


@kernel(
    "sampling.sample",
    name="cuda",
    needs=cuda(8, also=fatbin_for("sample")),
    dtypes={torch.float32},
    band=Band.NATIVE,
)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """A block a row. ValueError for settings of another shape or dtype."""
    rows, vocab_size = logits.shape
    settings = (temperature, top_k, top_p, min_p, seeds, positions)
    for setting, dtype in zip(settings, _DTYPES, strict=True):
        if setting.shape != (rows,) or setting.dtype != dtype or not setting.is_contiguous():
            raise ValueError(f"every setting must be a contiguous [{rows}], got {setting.dtype} {list(setting.shape)}")
    if logits.stride(1) != 1 or vocab_size == 0:
        raise ValueError("a row of logits must have elements, side by side")
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        arguments = (
            *(ctypes.c_void_p(part.data_ptr()) for part in (logits, *settings, tokens)),
            ctypes.c_int64(logits.stride(0)),
            ctypes.c_int(vocab_size),
        )
        _MODULE.launch("sample_rows", logits.device, rows, _THREADS, arguments)
    return tokens
