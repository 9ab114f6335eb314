# SPDX-License-Identifier: MIT
"""Run one case through a solution and through its reference, and measure how far apart they are.

Fresh outputs are poisoned with NaN, so an element that a solution forgets to write is seen. Weights pass through
`quant.prepare` for the device first, as at load, so preparation is checked with the products that read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel.api import prepare_experts, prepare_weight
from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.gemm.signature import PRODUCT_TRAITS, product_traits
from tokenspeed_kernel.moe.weights import ExpertMatrix, Experts
from tokenspeed_kernel.numerics.case import Case
from tokenspeed_kernel.numerics.cases import cases
from tokenspeed_kernel.numerics.tolerances import distance, tolerance
from tokenspeed_kernel.quant.packed import PackedWeight, Weight, weight_traits
from tokenspeed_kernel.registry import KernelSpec, solutions

_EXPERTS_OP = "moe.experts"
_PRODUCTS = ("gemm.linear", "gemm.linear_silu_and_mul", "gemm.linear_add", "gemm.logits")
_OVERWRITING_OPS = ("gemm.linear_add", "norm.add_rms", "rope.norm_store")
_WEIGHT_OPS = (*_PRODUCTS, "gemm.embedding", "gemm.heads")


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
    if case.op in _WEIGHT_OPS and _rounds(case.args[1]) != _rounds(prepared(spec, case, device)[1]):
        return False  # it computes something else there, more exactly
    return spec.misfit(spec.needs.device or device, case.dtype, call_traits(spec, case, device)) is None


def call_traits(spec: KernelSpec, case: Case, device: str) -> dict[str, Hashable]:
    """The traits by which selection sees the case's call on `device`, those of its prepared weights too."""
    traits = dict(case.traits)
    if case.op in _WEIGHT_OPS:
        weight = prepared(spec, case, device)[1]
        traits["weight_format"], traits["weight_layout"] = weight_traits(weight)
        if case.op in _PRODUCTS:
            traits |= dict(zip(PRODUCT_TRAITS, product_traits(case.args[0], weight), strict=True))
    if case.op == _EXPERTS_OP:
        traits["weight_formats"], traits["weight_layouts"], _ = prepared(spec, case, device)[3].traits
    return traits


def run_case(spec: KernelSpec, case: Case, device: str) -> float:
    """The largest `distance` over the case's outputs."""
    reference = next(item for item in solutions(case.op) if item.name == "reference")
    expected = _call(reference.fn, case, case.args)
    actual = _call(spec.fn, case, prepared(spec, case, device))
    if len(actual) != len(expected):
        return float("inf")
    pairs = zip(actual, expected, strict=True)
    return max(distance(got.cpu(), want, tolerance(case.op, _judged_as(case, want))) for got, want in pairs)


def _judged_as(case: Case, want: torch.Tensor) -> torch.dtype:
    """Logits are as exact as the activations they come from, though they are float32."""
    return case.dtype if case.op == "gemm.logits" else want.dtype


def _rounds(weight: Weight) -> bool:
    """Whether products with it round their inputs."""
    return isinstance(weight, PackedWeight) and weight.rounding is not None


def prepared(spec: KernelSpec, case: Case, device: str) -> tuple[Any, ...]:
    """The arguments on `device`, weights as they are after loading."""
    args = to_device(case.args, device)
    if case.op in _WEIGHT_OPS:
        return (args[0], _prepared_weight(spec, case, device), *args[2:])
    if case.op == _EXPERTS_OP:
        return (*args[:3], _prepared_experts(spec, case, device))
    return args


def _prepared_experts(spec: KernelSpec, case: Case, device: str) -> Experts:
    """As the solution's own device prepares them, also where that device is only interpreted."""
    experts: Experts = case.args[3]

    def prepare(matrix: ExpertMatrix) -> ExpertMatrix:
        if spec.needs.device in (None, torch.device(device).type):
            return prepare_experts(matrix.experts(), matrix.shape[0], device, case.dtype)
        found = next(item for item in solutions("moe.prepare") if item.needs.device == spec.needs.device)
        prepared: ExpertMatrix = found.fn(matrix.experts(), matrix.shape[0], torch.device(device), case.dtype)
        return prepared

    return Experts(
        tuple(prepare(matrix) for matrix in experts.gate_up),
        prepare(experts.down),
        to_device(experts.gate_up_bias, device),
        to_device(experts.down_bias, device),
        experts.activation,
    )


def _prepared_weight(spec: KernelSpec, case: Case, device: str) -> Weight:
    """The case's weight as the solution's own device prepares it, also where that device is only interpreted."""
    weight: Weight = case.args[1]
    kind = spec.needs.device or device
    if torch.device(device).type == kind:
        return prepare_weight(weight, device, case.dtype)
    data = weight if isinstance(weight, torch.Tensor) else weight.data
    format = {"weight_format": weight_traits(weight)[0]}
    best = next(item for item in solutions("quant.prepare") if item.misfit(kind, data.dtype, format) is None)
    prepared: Weight = best.fn(weight, torch.device(device), case.dtype)
    return prepared


def to_device(value: Any, device: str) -> Any:
    """A deep copy on `device`; strides of tensors are kept."""
    if isinstance(value, torch.Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return copy.copy_(value)
    if isinstance(value, (tuple, list)):
        copies = [to_device(item, device) for item in value]
        return type(value)(*copies) if hasattr(value, "_fields") else type(value)(copies)
    if isinstance(value, (AttentionMetadata, PackedWeight, ExpertMatrix, Experts)):
        fields = {f.name: to_device(getattr(value, f.name), device) for f in dataclasses.fields(value) if f.init}
        return type(value)(**fields)
    return value


def _call(fn: Callable[..., Any], case: Case, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What the call returns and what it changes, as a flat list; the arguments given are not changed."""
    mine = tuple(
        _copy(arg) if index in case.mutated or case.op in _OVERWRITING_OPS else arg for index, arg in enumerate(args)
    )
    with poisoned_outputs():
        returned = fn(*mine)
    found = [*_tensors(returned), *(tensor for index in case.mutated for tensor in _tensors(mine[index]))]
    # fp8 caches as their bytes: torch cannot compare the numbers.
    return [tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for tensor in found]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return to_device(value, str(value.device))
    if isinstance(value, (tuple, list)):
        copies = [_copy(item) for item in value]
        return type(value)(*copies) if hasattr(value, "_fields") else type(value)(copies)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in it, in order, whatever else there is."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []


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
