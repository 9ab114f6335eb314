# SPDX-License-Identifier: MIT
"""Dequantisation equals the `gguf` package's bit for bit, and malformed weights are refused by name."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tokenspeed_kernel.api import PackedWeight, prepare_weight
from tokenspeed_kernel.numerics.weight_cases import packed_weight
from tokenspeed_kernel.quant.packed import GGUF_FORMATS, row_bytes
from tokenspeed_kernel.quant.reference import dequantize


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_dequantised_values_equal_the_gguf_packages(format: str) -> None:
    weight = packed_weight(torch.Generator().manual_seed(1), format, 6, 1024)
    expected = gguf.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[format.upper()])
    assert np.array_equal(dequantize(weight).numpy(), expected)
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_block_sizes_equal_the_gguf_packages(format: str) -> None:
    assert tuple(GGUF_FORMATS[format]) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format.upper()]]


def test_row_that_does_not_fill_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="q4_1 row must be a multiple of 32"):
        row_bytes("q4_1", 100)


def test_bytes_that_disagree_with_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"q8_0 weight \(2, 64\) must be uint8 \(2, 68\)"):
        PackedWeight(torch.zeros(2, 67, dtype=torch.uint8), "q8_0", (2, 64))


def test_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'q3_k' is not a packed format; known: q4_0"):
        PackedWeight(torch.zeros(2, 67, dtype=torch.uint8), "q3_k", (2, 64))


def test_another_devices_layout_is_not_dequantised() -> None:
    with pytest.raises(ValueError, match="layout 'tiles'"):
        dequantize(PackedWeight(torch.zeros(3), "q8_0", (2, 64), "tiles"))


def test_dense_weight_stays_dense_on_the_cpu() -> None:
    weight = torch.randn(3, 64)
    prepared = prepare_weight(weight, "cpu")
    assert not isinstance(prepared, torch.Tensor) or torch.equal(prepared, weight)
