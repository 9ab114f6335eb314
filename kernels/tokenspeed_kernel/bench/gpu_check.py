# SPDX-License-Identifier: MIT
"""One call on a machine with a GPU: build the CUDA kernels, check every solution, time them.

`python kernels/tokenspeed_kernel/bench/gpu_check.py` from the repository's root. Needs nvcc, torch and Triton; no
network, no Bazel. Prints what it finds as it goes; exit status 1 when a solution is off or a kernel is missing.
Checking takes about two minutes, most of it compiling Triton kernels; timing about one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def build() -> None:
    """Compile csrc/cuda with the script that Bazel's rules mirror; CalledProcessError when it does not compile."""
    subprocess.run(
        ["bash", "tools/build_native.sh", "cuda"], cwd=ROOT, check=True, env={**os.environ, "PYTHON": sys.executable}
    )


def check(only: str) -> list[str]:
    """Hold solutions for this GPU against their references; returns what went wrong. only: OP=SOLUTION, or "": all."""
    import torch

    from tokenspeed_kernel.attention import cuda_paged, cuda_plan
    from tokenspeed_kernel.numerics.cases import covered_ops
    from tokenspeed_kernel.numerics.check import check_solution
    from tokenspeed_kernel.registry import current_platform, solutions

    cuda_paged.LEAST_SAVED = 1  # rows that can share a prefix do, so that this is checked too
    wrong: list[str] = []
    num_checked = 0
    for op in covered_ops():
        for item in solutions(op):
            if item.needs.device not in (None, "cuda") or only not in ("", f"{op}={item.name}"):
                continue
            if reason := item.needs.unmet(current_platform()):
                wrong.append(f"{op}={item.name}: {reason}")
                continue
            start = time.perf_counter()
            num_checked += 1
            results = check_solution(item, "cuda")
            failed = [result for result in results if not result.passed]
            worst = max((result.distance for result in results), default=float("nan"))
            print(
                f"{'FAIL' if failed else 'ok':<5}{op}={item.name}: {len(results)} cases, worst at {worst:.2f} of the "
                f"tolerance, {time.perf_counter() - start:.1f} s",
                flush=True,
            )
            wrong += [
                f"{op}={item.name}, {result.case.dtype}, {result.case.label}: {result.distance:.2f}"
                for result in failed
            ]
            if cuda_plan.counters(torch.device("cuda", 0)).any():
                wrong.append(f"{op}={item.name}: left counters that the next launch takes to be zero")
    return wrong or ([] if num_checked else [f"{only}: there is no such solution"])


def products() -> list[str]:
    """Hold our dense products against float32 at every number of rows; returns what went wrong."""
    from tokenspeed_kernel.bench.product_check import check_products

    start = time.perf_counter()
    wrong = list(check_products())
    seconds = time.perf_counter() - start
    print(f"{'FAIL' if wrong else 'ok':<5}products at every number of rows, {seconds:.1f} s", flush=True)
    return wrong


def explain() -> None:
    """Print who wins each operation in bfloat16."""
    from tokenspeed_kernel.explain import explain_text
    from tokenspeed_kernel.registry import operations

    for op in sorted(operations()):
        dtype = "float32" if op.startswith("sampling.") else "bfloat16"
        print(explain_text(op, ["device=cuda", f"dtype={dtype}"]), flush=True)


def main(arguments: list[str]) -> int:
    """Build, explain, check, time."""
    parser = argparse.ArgumentParser(description="build, check and time the GPU kernels")
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--only", metavar="OP=SOLUTION", default="", help="check and time this alone")
    parser.add_argument("--budget-s", type=float, default=0.1, help="seconds to spend on each timing")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "kernels"))
    if not options.no_build:
        build()
    import torch

    if not torch.cuda.is_available():
        print("error: torch sees no GPU here", file=sys.stderr)
        return 2
    if not options.only:
        explain()
    wrong = check(options.only) + ([] if options.only else products())
    if not options.no_bench:
        from tokenspeed_kernel.bench.driver import measure, print_rows

        op = options.only.partition("=")[0] or None
        print_rows(measure("cuda", op, budget_s=options.budget_s), as_json=False)
    for line in wrong:
        print(f"WRONG {line}")
    print(f"{len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
