# SPDX-License-Identifier: MIT
"""The benchmark prints a row with sane figures for a solution of this machine, and refuses what it lacks."""

from __future__ import annotations

import json

import pytest
import torch

from tokenspeed_kernel.bench import driver
from tokenspeed_kernel.bench.timing import Ceiling, seconds_per_call
from tokenspeed_kernel.bench.workloads import workloads
from tokenspeed_kernel.registry import current_platform, solutions

_COMPARED = {"norm.add_rms", "activation.silu_and_mul", "gemm.linear", "moe.experts"}
HAS_CPU_SOLUTIONS = any(item.name != "reference" for item in solutions("norm.rms") if item.needs.device == "cpu")


@pytest.mark.skipif(not HAS_CPU_SOLUTIONS, reason="the CPU kernels are not built: tools/build_native.sh cpu")
def test_row_states_time_rate_share_of_the_ceiling_and_torchs_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["--op", "norm.rms", "--only", "[16, 576]", "--budget-s", "0.01", "--json"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["op"], row["workload"], row["unit"]) == ("norm.rms", "[16, 576]", "GB/s")
    assert row["us"] > 0
    assert row["ratio_to_torch"] == pytest.approx(row["torch_us"] / row["us"])
    assert row["rate"] == pytest.approx(2 * 16 * 576 * 4 / row["us"] / 1e3)


@pytest.mark.skipif(current_platform().cuda_capability is not None, reason="this machine has a GPU")
def test_absent_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "ts kernels bench: error: --device cuda: this machine has none\n"


def test_unknown_operation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["--op", "norm.rmx"]) == 2
    assert capsys.readouterr().err.startswith("ts kernels bench: error: unknown operation 'norm.rmx'; known: ")


def test_every_cpu_workload_gives_torch_what_the_reference_computes() -> None:
    compared = set()
    for workload in workloads("cpu"):
        if workload.op not in compared and workload.op in _COMPARED:
            compared.add(workload.op)
            reference = next(item for item in solutions(workload.op) if item.name == "reference")
            ours, theirs = reference.fn(*workload.args), workload.peer(*workload.peer_args(workload.args))
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert compared == _COMPARED


def test_dense_attention_for_torch_equals_the_paged_reference() -> None:
    for workload in workloads("cpu"):
        if workload.op in ("attention.paged", "attention.mla"):
            reference = next(item for item in solutions(workload.op) if item.name == "reference")
            theirs = workload.peer(*workload.peer_args(workload.args))
            assert isinstance(theirs, torch.Tensor)
            torch.testing.assert_close(reference.fn(*workload.args), theirs.transpose(1, 2).flatten(0, 1))


def test_floor_is_the_slower_of_traffic_and_arithmetic() -> None:
    limits = Ceiling(bytes_per_s=100.0, flops_per_s=1000.0)
    assert limits.floor_s(200, 500) == 2.0
    assert limits.floor_s(20, 5000) == 5.0


def test_time_is_the_median_of_the_calls() -> None:
    assert 0 <= seconds_per_call([lambda: None, lambda: None], "cpu", budget_s=0.001) < 0.01
