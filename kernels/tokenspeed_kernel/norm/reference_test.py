# SPDX-License-Identifier: MIT
"""The norm references equal torch's own in float32, and round once in the other dtypes."""

from __future__ import annotations

import torch

from tokenspeed_kernel.norm.reference import add_rms_norm, rms_norm


def test_rms_norm_equals_torchs() -> None:
    x, weight = torch.randn(5, 96), torch.randn(96)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (96,), weight, 1e-5))


def test_add_rms_norm_returns_norm_of_the_sum_and_the_sum() -> None:
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x + residual, (96,), weight, 1e-6))


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    x, weight = torch.randn(5, 96).bfloat16(), torch.randn(96).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.float(), weight.float(), 1e-5).bfloat16())
