# SPDX-License-Identifier: MIT
"""GGUF's types of two and three bits, for which no kernel multiplies: a q3_k block is a q6_k block of fewer values to
the bit, so it becomes one; a q2_k block, whose sixteen parts have minima of their own, is decoded.

Layouts are those of the GGUF specification. A block has 256 values in parts of 16.
"""

from __future__ import annotations

import torch

Q2_K_BYTES, Q3_K_BYTES = 84, 110
_PAIRS = torch.arange(0, 8, 2, dtype=torch.uint8)
_BITS = torch.arange(8, dtype=torch.uint8)


def decode_q2_k(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [R, n * 84] to float32 [R, n * 256]: four bits of scale and of minimum a part, then values, then two
    float16 that multiply scales and minima."""
    blocks = rows.reshape(-1, Q2_K_BYTES)
    parts, quants, halves = blocks[:, :16], blocks[:, 16:80], blocks[:, 80:].contiguous().view(torch.float16).float()
    scale = (halves[:, :1] * (parts & 15).float())[:, :, None]
    minimum = (halves[:, 1:] * (parts >> 4).float())[:, :, None]
    values = ((quants.reshape(-1, 2, 1, 32) >> _PAIRS[:, None]) & 3).reshape(-1, 16, 16)
    return (scale * values.float() - minimum).reshape(rows.shape[0], -1)


def q6_k_of_q3_k(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [R, n * 110] to uint8 [R, n * 210]: third bits of the values, their two lower ones, sixteen scales of six
    bits, a float16."""
    blocks = rows.reshape(-1, Q3_K_BYTES)
    thirds, lower, packed, half = torch.split_with_sizes(blocks, [32, 64, 12, 2], 1)
    low = ((lower.reshape(-1, 2, 1, 32) >> _PAIRS[:, None]) & 3).reshape(-1, 2, 4, 32)
    third = ((thirds[:, None, :] >> _BITS[:, None]) & 1).reshape(-1, 2, 4, 32)
    # The third bit says that 4 is not taken away; q6_k takes 32 away.
    values = low + 4 * third + 28
    ql = values[:, :, :2] & 15 | (values[:, :, 2:] & 15) << 4
    high = values >> 4
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    scale_low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], dim=1)
    scale_high = ((packed[:, None, 8:] >> _PAIRS[:, None]) & 3).reshape(-1, 16)
    scales = (scale_low | scale_high << 4).to(torch.int8) - 32
    out = torch.cat([ql.reshape(-1, 128), qh.reshape(-1, 64), scales.view(torch.uint8), half], dim=1)
    return out.reshape(rows.shape[0], -1)
