# SPDX-License-Identifier: MIT
"""Preparation of experts for GPUs: one dense tensor in the activations' dtype, filled expert by expert."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tokenspeed_kernel.moe.weights import ExpertMatrix
from tokenspeed_kernel.quant.packed import ROWS_LAYOUT, Weight
from tokenspeed_kernel.quant.vendor_torch import prepare as prepare_one
from tokenspeed_kernel.registry import Band, cuda, kernel


@kernel(
    "moe.prepare",
    name="torch",
    needs=cuda(7),
    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.uint8),
    band=Band.PORTABLE,
)
def prepare(experts: Iterable[Weight], num_experts: int, device: torch.device, dtype: torch.dtype) -> ExpertMatrix:
    """No more than one expert is held twice."""
    data: torch.Tensor | None = None
    for index, weight in enumerate(experts):
        dense = prepare_one(weight, device, dtype)
        assert isinstance(dense, torch.Tensor)  # a GPU keeps nothing packed
        if data is None:
            data = torch.empty((num_experts, *dense.shape), dtype=dtype, device=device)
        data[index] = dense
    assert data is not None  # held by the api
    _, num_rows, num_columns = data.shape
    return ExpertMatrix(data, str(dtype).removeprefix("torch."), (num_experts, num_rows, num_columns), ROWS_LAYOUT)
