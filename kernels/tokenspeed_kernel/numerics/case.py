# SPDX-License-Identifier: MIT
"""One random call of an operation, and the numbers that such calls are made of."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Dtype = torch.dtype


@dataclass(frozen=True)
class Case:
    """One call.

    op: operation name; label: what is particular about the call; dtype: the activations'.
    args: the api call's positional arguments, tensors on the CPU.
    mutated: indices of arguments that the call changes; they are compared after it, whole.
    traits: the call's selection traits, those of weights left out (their layout depends on the device).
    """

    op: str
    label: str
    dtype: Dtype
    args: tuple[Any, ...]
    mutated: tuple[int, ...] = ()
    traits: Mapping[str, Hashable] = field(default_factory=dict)


def normal(generator: torch.Generator, *shape: int, dtype: Dtype = torch.float32, std: float = 1.0) -> torch.Tensor:
    """Normal values of `std`, rounded to `dtype`."""
    return (torch.randn(*shape, generator=generator) * std).to(dtype)
