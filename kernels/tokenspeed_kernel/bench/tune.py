# SPDX-License-Identifier: MIT
"""`ts kernels tune`: time every solution of the benchmark's calls and write the fastest of each to the tuning table.

Only calls that two solutions or more can serve are timed; the reference takes no part. What the table already says of
other calls and machines stays. Selection reads the table when a process starts (registry/tuning.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenspeed_kernel.bench.driver import candidates, solution_seconds
from tokenspeed_kernel.bench.workloads import workloads
from tokenspeed_kernel.numerics.check import call_traits
from tokenspeed_kernel.registry import KernelError, current_platform, forget_tuning, solutions
from tokenspeed_kernel.registry.tuning import call_key, read_table, tuning_path, write_table


class Measured(NamedTuple):
    """One call: its key in the table, and seconds by solution, the fastest first."""

    key: str
    seconds: dict[str, float]


def measure(device: str, op: str | None, budget_s: float) -> Iterator[Measured]:
    """Time the solutions of every workload of `op` (all if None) that leaves a choice."""
    for workload in workloads(device):
        chosen = candidates(workload, device) if op in (None, workload.op) else []
        if len(chosen) > 1:
            seconds = {item.name: solution_seconds(item, workload, device, budget_s) for item in chosen}
            traits = call_traits(chosen[0], workload.case(), device)
            key = call_key(workload.op, device, workload.dtype, traits)
            yield Measured(key, dict(sorted(seconds.items(), key=lambda timed: timed[1])))


def tune(device: str, op: str | None, budget_s: float) -> int:
    """Measure, print a line a call, write the table; returns how many calls it now knows of this machine."""
    path, machine = tuning_path(), current_platform().describe()
    table = read_table(path)
    calls = table.setdefault(machine, {})
    for measured in measure(device, op, budget_s):
        calls[measured.key] = next(iter(measured.seconds))
        times = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in measured.seconds.items())
        print(f"{measured.key}: {times}", flush=True)
    write_table(path, table)
    forget_tuning()
    print(f"{path}: {len(calls)} calls of {machine}")
    return len(calls)


def main(arguments: Sequence[str]) -> int:
    """Parse and run; exit status 2 where the device is absent or the operation unknown, 1 where nothing is written."""
    parser = argparse.ArgumentParser(
        prog="ts kernels tune", description="measure kernel solutions and keep the fastest"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, else the CPU")
    parser.add_argument("--op", help="only this operation, such as gemm.linear")
    parser.add_argument("--budget-s", type=float, default=0.05, help="seconds to spend on each timing")
    options = parser.parse_args(arguments)
    device = options.device or ("cpu" if current_platform().cuda_capability is None else "cuda")
    if not current_platform().has_device(device):
        print(f"ts kernels tune: error: --device {device}: this machine has none", file=sys.stderr)
        return 2
    try:
        if options.op is not None:
            solutions(options.op)
        tune(device, options.op, options.budget_s)
    except KernelError as error:
        print(f"ts kernels tune: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"ts kernels tune: error: cannot write {tuning_path()}: {error}", file=sys.stderr)
        return 1
    return 0
