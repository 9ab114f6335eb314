# SPDX-License-Identifier: MIT
"""GGUF's types of two and three bits, held against the `gguf` package on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenspeed.weights.low_bits import Q2_K_BYTES, Q3_K_BYTES, decode_q2_k, q6_k_of_q3_k
from tokenspeed_kernel.quant.reference import dequantize_rows


def random_rows(num_bytes: int) -> NDArray[np.uint8]:
    """Three rows of two blocks; every byte but the scales is any."""
    random = np.random.default_rng(5)
    blocks = random.integers(0, 256, (6, num_bytes), np.uint8)
    # Both types end in float16 scales: q2_k two of them.
    count = 2 if num_bytes == Q2_K_BYTES else 1
    blocks[:, -2 * count :] = random.normal(0, 0.1, (6, count)).astype(np.float16).view(np.uint8)
    return blocks.reshape(3, 2 * num_bytes)


def test_q2_k_is_decoded_to_the_bit() -> None:
    rows = random_rows(Q2_K_BYTES)
    expected = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType.Q2_K))
    assert torch.equal(decode_q2_k(torch.from_numpy(rows)), expected)


def test_q3_k_is_q6_k_to_the_bit() -> None:
    rows = random_rows(Q3_K_BYTES)
    expected = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType.Q3_K))
    assert torch.equal(dequantize_rows(q6_k_of_q3_k(torch.from_numpy(rows)), "q6_k"), expected)


@pytest.mark.parametrize("code", [0, 63])
def test_the_ends_of_q3_ks_scales(code: int) -> None:
    block = np.zeros((1, Q3_K_BYTES), np.uint8)
    block[0, -2:] = np.array([1.0], np.float16).view(np.uint8)
    block[0, 96:108] = 255 if code else 0
    expected = torch.from_numpy(gguf.dequantize(block, gguf.GGMLQuantizationType.Q3_K))
    assert expected.unique().tolist() == [-4.0 * (code - 32)]
    assert torch.equal(dequantize_rows(q6_k_of_q3_k(torch.from_numpy(block)), "q6_k"), expected)
