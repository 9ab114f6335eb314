# SPDX-License-Identifier: MIT
"""The gate is the first half of the last axis."""

from __future__ import annotations

import torch

from tokenspeed_kernel.activation.reference import silu_and_mul


def test_silu_of_the_first_half_times_the_second() -> None:
    x = torch.randn(3, 12)
    torch.testing.assert_close(silu_and_mul(x), torch.nn.functional.silu(x[:, :6]) * x[:, 6:])
