# SPDX-License-Identifier: MIT
"""Preparation of weights for our CPU kernels: sixteen rows side by side, bits unchanged.

The layout is described in csrc/cpu/weight_format.h. Packed formats stay packed, dense ones keep their dtype: the
kernels dequantise in registers. Called once per weight at load.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.quant.packed import GGUF_LAYOUT, PackedWeight, Weight, weight_traits
from tokenspeed_kernel.registry import Band, cpu, kernel

CPU_LAYOUT = "cpu_rows16"

# The numbers of WeightFormat in csrc/cpu/weight_format.h.
FORMAT_CODES = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "q4_0": 3,
    "q4_1": 4,
    "q5_0": 5,
    "q5_1": 6,
    "q8_0": 7,
    "q4_k": 8,
    "q5_k": 9,
    "q6_k": 10,
}


@kernel(
    "quant.prepare",
    name="cpu_rows16",
    needs=cpu(),
    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.uint8),
    traits={"weight_format": FORMAT_CODES},
    band=Band.NATIVE,
)
def prepare(weight: Weight, device: torch.device, dtype: torch.dtype) -> PackedWeight:
    """The weight in layout "cpu_rows16"; `dtype` plays no part, nothing is dequantised. ValueError unless 2-D."""
    format, layout = weight_traits(weight)
    source = weight if isinstance(weight, torch.Tensor) else weight.data
    if isinstance(weight, PackedWeight) and layout != GGUF_LAYOUT:
        raise ValueError(f"a weight is prepared once; this one is in layout {layout!r} already")
    if source.dim() != 2:
        raise ValueError(f"a weight to prepare must have shape [N, K], got {tuple(source.shape)}")
    num_rows, num_values = weight.shape
    code = FORMAT_CODES[format]
    source = source.contiguous()
    packed = torch.empty(_cpu.packed_bytes(code, num_rows, num_values), dtype=torch.uint8)
    _cpu.pack(code, source.data_ptr(), num_rows, num_values, packed.data_ptr())
    return PackedWeight(packed, format, (num_rows, num_values), CPU_LAYOUT)
