# SPDX-License-Identifier: MIT
"""The benchmark's command: picks solutions for every workload, times them and torch, prints a table or JSON.

A row says how long a call takes, its rate, that rate's share of what this machine was measured to reach, and how
often torch's own operation fits into that time (above 1: ours is faster). All in one process and run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tokenspeed_kernel.bench.timing import Call, ceiling, seconds_per_call
from tokenspeed_kernel.bench.workloads import Workload, workloads
from tokenspeed_kernel.numerics.check import prepared, serves, to_device
from tokenspeed_kernel.registry import KernelError, KernelSpec, current_platform, solutions

_ROTATED_BYTES = 256 << 20
_MAX_COPIES = 8


class Row(NamedTuple):
    """One timed solution. percent_of_ceiling is of bandwidth or arithmetic, whichever bounds the call."""

    op: str
    solution: str
    workload: str
    us: float
    rate: float
    unit: str
    percent_of_ceiling: float
    torch_us: float

    @property
    def ratio(self) -> float:
        """Torch's time over ours."""
        return self.torch_us / self.us


def measure(device: str, op: str | None = None, budget_s: float = 0.2, only: str = "") -> Iterator[Row]:
    """Time every solution but the reference on every workload of `op` (all if None) whose label contains `only`."""
    for workload in workloads(device):
        if op in (None, workload.op) and only in workload.label:
            chosen = candidates(workload, device)
            if chosen:
                torch_s = seconds_per_call(_peer_calls(workload, device), device, budget_s)
            for item in chosen:
                yield _row(item, workload, device, budget_s, torch_s)


def candidates(workload: Workload, device: str) -> list[KernelSpec]:
    """The solutions that can serve the call here, without the reference."""
    return [
        item
        for item in solutions(workload.op)
        if item.name != "reference"
        and item.needs.device in (None, device)
        and item.needs.unmet(current_platform()) is None
        and serves(item, workload.case(), device)
    ]


def solution_seconds(item: KernelSpec, workload: Workload, device: str, budget_s: float) -> float:
    """The median time of the call by one solution."""
    return seconds_per_call(_calls(item, workload, device), device, budget_s)


def _row(item: KernelSpec, workload: Workload, device: str, budget_s: float, torch_s: float) -> Row:
    seconds = solution_seconds(item, workload, device, budget_s)
    limits = ceiling(device, workload.dtype)
    bound_by_flops = workload.num_flops / limits.flops_per_s > workload.num_bytes / limits.bytes_per_s
    amount, unit = (workload.num_flops / 1e12, "TFLOP/s") if bound_by_flops else (workload.num_bytes / 1e9, "GB/s")
    share = limits.floor_s(workload.num_bytes, workload.num_flops) / seconds
    return Row(
        workload.op, item.name, workload.label, seconds * 1e6, amount / seconds, unit, 100 * share, torch_s * 1e6
    )


def _num_copies(workload: Workload, device: str) -> int:
    return 1 if device == "cpu" else max(1, min(_MAX_COPIES, _ROTATED_BYTES // max(workload.num_bytes, 1)))


def _calls(item: KernelSpec, workload: Workload, device: str) -> list[Call]:
    def one() -> Call:
        args = prepared(item, workload.case(), device)
        return lambda: item.fn(*args)

    return [one() for _ in range(_num_copies(workload, device))]


def _peer_calls(workload: Workload, device: str) -> list[Call]:
    def one() -> Call:
        args = workload.peer_args(to_device(workload.args, device))
        return lambda: workload.peer(*args)

    return [one() for _ in range(_num_copies(workload, device))]


def print_rows(rows: Iterator[Row], as_json: bool) -> None:
    """Write each row to stdout as soon as it is measured."""
    if not as_json:
        print(f"{'operation':<24}{'solution':<16}{'us':>10}{'rate':>18}{'ceiling':>9}{'x torch':>9}  workload")
    for row in rows:
        if as_json:
            print(json.dumps({**row._asdict(), "ratio_to_torch": row.ratio}), flush=True)
        else:
            rate = f"{row.rate:.2f} {row.unit}"
            print(
                f"{row.op:<24}{row.solution:<16}{row.us:>10.1f}{rate:>18}{row.percent_of_ceiling:>8.0f}%"
                f"{row.ratio:>9.2f}  {row.workload}",
                flush=True,
            )


def main(arguments: Sequence[str]) -> int:
    """Parse and run; exit status 2 where the device is absent or an override is wrong."""
    parser = argparse.ArgumentParser(prog="ts kernels bench", description="time kernel solutions")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--op", help="only this operation, such as attention.paged")
    parser.add_argument("--only", default="", help="only workloads whose label contains this text")
    parser.add_argument("--budget-s", type=float, default=0.2, help="seconds to spend on each timing")
    parser.add_argument("--threads", type=int, default=0, help="torch's CPU threads; 0 leaves them")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    if not current_platform().has_device(options.device):
        print(f"ts kernels bench: error: --device {options.device}: this machine has none", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        if options.op is not None:
            solutions(options.op)
        print_rows(measure(options.device, options.op, options.budget_s, options.only), options.json)
    except KernelError as error:
        print(f"ts kernels bench: error: {error}", file=sys.stderr)
        return 2
    return 0
