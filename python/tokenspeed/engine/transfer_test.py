# SPDX-License-Identifier: MIT
"""A step's arrays arrive whole, whatever their shapes and dtypes, and stay until their buffer's turn comes again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenspeed.engine.transfer import PinnedTransfer, share_memory

ARRAYS: list[NDArray[Any]] = [
    np.arange(5, dtype=np.int64),
    np.zeros((0, 3), np.int32),
    np.arange(33, dtype=np.int32).reshape(11, 3),
    np.array([7], np.int32),
    np.arange(100_000, dtype=np.int64)[::2],
]


@pytest.mark.parametrize("transfer", [share_memory, PinnedTransfer(torch.device("cpu"), 2)], ids=["shared", "staged"])
def test_arrays_arrive_as_they_were(transfer: PinnedTransfer) -> None:
    for _ in range(5):
        tensors = transfer(ARRAYS)
        for tensor, array in zip(tensors, ARRAYS, strict=True):
            assert tensor.shape == array.shape
            assert np.array_equal(tensor.numpy(), array)
