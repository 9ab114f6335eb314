# SPDX-License-Identifier: MIT
"""Every solution that this machine can run agrees with its reference, and the check notices one that does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tokenspeed_kernel.numerics.cases import FLOATS, cases, covered_ops
from tokenspeed_kernel.numerics.check import check_solution, run_case
from tokenspeed_kernel.numerics.tolerances import Tolerance, distance
from tokenspeed_kernel.registry import KernelSpec, current_platform, operations, solutions

RUNNABLE = [
    pytest.param(item, id=f"{op}={item.name}")
    for op in covered_ops()
    for item in solutions(op)
    if item.name != "reference" and item.needs.device in (None, "cpu") and item.needs.unmet(current_platform()) is None
]


def test_every_operation_has_cases_but_preparation_which_runs_in_the_cases_that_need_it() -> None:
    declared = {op for op in operations() if not op.startswith("test.")}
    assert declared - set(covered_ops()) == {"quant.prepare", "moe.prepare"}


@pytest.mark.parametrize("item", RUNNABLE)
def test_solution_agrees_with_the_reference_on_every_case_and_dtype(item: KernelSpec) -> None:
    results = check_solution(item, "cpu")
    assert results, "no case fits what the solution declares"
    assert [f"{result.case.label}: {result.distance:.2f}" for result in results if not result.passed] == []


def _reference(op: str) -> KernelSpec:
    return next(item for item in solutions(op) if item.name == "reference")


def test_output_left_unwritten_is_noticed() -> None:
    broken = dataclasses.replace(_reference("norm.rms"), fn=lambda x, weight, eps: torch.empty_like(x))
    assert run_case(broken, cases("norm.rms", torch.float32)[0], "cpu") == float("inf")


def test_write_outside_the_slots_is_noticed() -> None:
    reference = _reference("kvcache.store")

    def also_elsewhere(k, v, k_cache, v_cache, slots, scales):  # type: ignore[no-untyped-def]
        reference.fn(k, v, k_cache, v_cache, slots, scales)
        k_cache[-1, -1, -1, -1] += 1

    broken = dataclasses.replace(reference, fn=also_elsewhere)
    assert run_case(broken, cases("kvcache.store", torch.float32)[0], "cpu") > 1.0


def test_error_of_one_bfloat16_step_passes_and_of_ten_does_not() -> None:
    bound = Tolerance(1e-2, 1e-2)
    one = torch.ones(4, dtype=torch.bfloat16)
    step = torch.tensor(2.0**-7, dtype=torch.bfloat16)
    assert distance(one + step, one, bound) <= 1.0 < distance(one + 10 * step, one, bound)


@pytest.mark.parametrize("dtype", FLOATS)
def test_cases_of_one_seed_are_the_same_each_time(dtype: torch.dtype) -> None:
    first, second = cases("norm.rms", dtype), cases("norm.rms", dtype)
    assert all(torch.equal(a.args[0], b.args[0]) for a, b in zip(first[:-1], second[:-1], strict=True))
