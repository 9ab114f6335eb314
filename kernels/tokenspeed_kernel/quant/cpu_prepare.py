# SPDX-License-Identifier: MIT
"""Preparation of weights for our CPU kernels: sixteen rows side by side, bits unchanged.

The layout is described in csrc/cpu/weight_format.h. Packed formats stay packed, dense ones keep their dtype: the
kernels dequantise in registers. Called once per weight at load.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.quant.packed import BLOCKS_LAYOUT, PackedWeight, Weight, weight_traits
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
    "fp8_b32": 11,
    "fp8_b128": 12,
    "int8_b32": 13,
    "int8_b128": 14,
    "int4_b32": 15,
    "int4_b128": 16,
}


_HUGE_PAGE = 2 << 20
_ARENA_BYTES = 32 << 20


class Arena:
    """Packed weights one after the other in large buffers, which the system can back by huge pages.

    A decode step streams all weights once. With small pages, address translation and prefetchers that stop at page
    ends took a seventh of one core's bandwidth on a Zen 4. A buffer lives until the last weight in it is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer: Callable[[], NDArray[np.uint8] | None] = lambda: None
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 [num_bytes], aligned to a cache line."""
        padded = -(-num_bytes // 64) * 64
        if padded > _ARENA_BYTES // 4:
            return _huge_buffer(padded)[:num_bytes]
        with self._lock:
            buffer = self._buffer()
            if buffer is None or self._used + padded > _ARENA_BYTES:
                buffer, self._used = _huge_buffer(_ARENA_BYTES).numpy(), 0
                # What is left must not keep the buffer: a model that goes takes all its memory along.
                self._buffer = weakref.ref(buffer)
            start, self._used = self._used, self._used + padded
        return torch.from_numpy(buffer)[start : start + num_bytes]


def _huge_buffer(num_bytes: int) -> torch.Tensor:
    raw = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % _HUGE_PAGE
    buffer = raw[start : start + num_bytes]
    _cpu.advise_huge_pages(buffer.data_ptr(), num_bytes)
    return buffer


_arena = Arena()


def packed_buffer(num_bytes: int) -> torch.Tensor:
    """Uninitialised uint8 [num_bytes] for packed weights, aligned to a cache line."""
    return _arena.take(num_bytes)


def pack_into(weight: Weight, packed: torch.Tensor) -> None:
    """Write a [N, K] weight's bits into `packed`, uint8 of its packed size. ValueError when it is prepared already."""
    format, layout = weight_traits(weight)
    source = weight if isinstance(weight, torch.Tensor) else weight.data
    if isinstance(weight, PackedWeight) and layout != BLOCKS_LAYOUT:
        raise ValueError(f"a weight is prepared once; this one is in layout {layout!r} already")
    source = source.contiguous()
    _cpu.pack(FORMAT_CODES[format], source.data_ptr(), weight.shape[0], weight.shape[1], packed.data_ptr())


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
    if len(weight.shape) != 2:
        raise ValueError(f"a weight to prepare must have shape [N, K], got {tuple(weight.shape)}")
    format = weight_traits(weight)[0]
    shape = (weight.shape[0], weight.shape[1])
    packed = packed_buffer(_cpu.packed_bytes(FORMAT_CODES[format], *shape))
    pack_into(weight, packed)
    columns = weight.columns if isinstance(weight, PackedWeight) else None
    return PackedWeight(packed, format, shape, CPU_LAYOUT, columns=columns)
