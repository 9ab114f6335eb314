# SPDX-License-Identifier: MIT
"""Run every Triton solution on CPU tensors under Triton's interpreter and print how far each case is off.

`python -m tokenspeed_kernel.numerics.interpret` sets TRITON_INTERPRET itself, before Triton is imported, so it
needs a process of its own. Prints one JSON object: solution to list of [dtype, case, distance].
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not before the interpreter is asked for
    from tokenspeed_kernel.numerics.case import Case
    from tokenspeed_kernel.registry import KernelSpec

# Parts of the mixed steps; the interpreter is slow enough without them.
_SKIPPED = ("one decode row", "a whole prompt", "a chunk after a prefix", "long")
# The kernels of batch-invariant solutions are the others' with other tiles.
_SKIPPED_OF_INVARIANT = ("decode rows of many lengths",)


def _keep(spec: KernelSpec, case: Case) -> bool:
    if not spec.name.startswith("triton_invariant"):
        return not case.label.startswith(_SKIPPED)
    return not case.label.startswith((*_SKIPPED, *_SKIPPED_OF_INVARIANT)) and not case.label.endswith("cache")


def main() -> int:
    """Returns 0; judging the distances is left to the caller."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from tokenspeed_kernel.numerics.cases import covered_ops
    from tokenspeed_kernel.numerics.check import check_solution
    from tokenspeed_kernel.registry import solutions

    torch.set_num_threads(1)
    found = {}
    for op in covered_ops():
        for item in solutions(op):
            if item.name.startswith("triton"):
                results = check_solution(item, "cpu", keep=functools.partial(_keep, item))
                found[f"{op}={item.name}"] = [
                    [str(result.case.dtype), result.case.label, result.distance] for result in results
                ]
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
