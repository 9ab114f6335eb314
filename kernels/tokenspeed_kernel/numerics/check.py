# SPDX-License-Identifier: MIT
"""Run one case through a solution and through its reference, and measure how far apart they are.

Fresh outputs are poisoned with NaN, so an element that a solution forgets to write is seen. Weights pass through
`quant.prepare` for the device first, as at load, so preparation is checked with the products that read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel.api import prepare_weight
from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.numerics.cases import Case, cases
from tokenspeed_kernel.numerics.tolerances import distance, tolerance
from tokenspeed_kernel.quant.packed import PackedWeight, weight_traits
from tokenspeed_kernel.registry import KernelSpec, solutions

_WEIGHT_OPS = ("gemm.linear", "gemm.embedding")


class Result(NamedTuple):
    """How one case went. distance: 1.0 is the edge of the tolerance."""

    case: Case
    distance: float

    @property
    def passed(self) -> bool:
        """Whether every output is within its tolerance."""
        return self.distance <= 1.0


def check_solution(spec: KernelSpec, device: str, keep: Callable[[Case], bool] = lambda _: True) -> list[Result]:
    """Every case that `spec` can serve on torch device `device`, in every dtype it declares."""
    return [
        Result(case, run_case(spec, case, device))
        for dtype in sorted(spec.dtypes, key=str)
        for case in cases(spec.op, dtype)
        if keep(case) and serves(spec, case, device)
    ]


def serves(spec: KernelSpec, case: Case, device: str) -> bool:
    """Whether the solution takes such a call; the device type itself is not looked at."""
    traits = dict(case.traits)
    if case.op in _WEIGHT_OPS:
        weight = prepare_weight(case.args[1], device, case.dtype)
        traits["weight_format"], traits["weight_layout"] = weight_traits(weight)
    return spec.misfit(spec.needs.device or device, case.dtype, traits) is None


def run_case(spec: KernelSpec, case: Case, device: str) -> float:
    """The largest `distance` over the case's outputs."""
    reference = next(item for item in solutions(case.op) if item.name == "reference")
    expected = _call(reference.fn, case, case.args)
    args = to_device(case.args, device)
    if case.op in _WEIGHT_OPS:
        args = (args[0], prepare_weight(case.args[1], device, case.dtype), *args[2:])
    actual = _call(spec.fn, case, args)
    if len(actual) != len(expected):
        return float("inf")
    pairs = zip(actual, expected, strict=True)
    return max(distance(got.cpu(), want, tolerance(case.op, want.dtype)) for got, want in pairs)


def to_device(value: Any, device: str) -> Any:
    """A deep copy on `device`; strides of tensors are kept."""
    if isinstance(value, torch.Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return copy.copy_(value)
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, (AttentionMetadata, PackedWeight)):
        fields = {f.name: to_device(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    return value


def _call(fn: Callable[..., Any], case: Case, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What the call returns and what it changes, as a flat list; the arguments given are not changed."""
    mine = tuple(
        _copy(arg) if index in case.mutated or case.op == "norm.add_rms" else arg for index, arg in enumerate(args)
    )
    with poisoned_outputs():
        returned = fn(*mine)
    return [*_tensors(returned), *(tensor for index in case.mutated for tensor in _tensors(mine[index]))]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return to_device(value, str(value.device))
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, torch.Tensor) else list(value)


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Let `torch.empty` give NaN (or the largest integer) instead of whatever the memory held."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
