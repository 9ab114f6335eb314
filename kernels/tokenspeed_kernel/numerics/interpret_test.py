# SPDX-License-Identifier: MIT
"""Every Triton solution agrees with its reference under the interpreter, in every dtype it declares."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tokenspeed_kernel.numerics.cases import covered_ops
from tokenspeed_kernel.registry import KernelSpec, solutions

TRITON = [
    pytest.param(item, id=f"{op}={item.name}")
    for op in covered_ops()
    for item in solutions(op)
    if item.name.startswith("triton")
]


@pytest.fixture(scope="module")
def results() -> dict[str, list[tuple[str, str, float]]]:
    """One interpreter process for all, since importing torch and Triton costs more than the cases."""
    done = subprocess.run(
        [sys.executable, "-m", "tokenspeed_kernel.numerics.interpret"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[tuple[str, str, float]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("item", TRITON)
def test_solution_agrees_with_the_reference_in_every_dtype(
    item: KernelSpec, results: dict[str, list[tuple[str, str, float]]]
) -> None:
    mine = results[f"{item.op}={item.name}"]
    assert {dtype for dtype, _, _ in mine} == {str(dtype) for dtype in item.dtypes}
    assert [f"{dtype} {label}: {off:.2f}" for dtype, label, off in mine if not off <= 1.0] == []


def test_the_kernels_that_a_step_spends_its_time_in_have_triton_solutions() -> None:
    ops = {param.values[0].op for param in TRITON}  # type: ignore[union-attr]
    assert ops >= {"attention.paged", "norm.rms", "norm.add_rms", "rope.neox", "kvcache.store", "sampling.sample"}
