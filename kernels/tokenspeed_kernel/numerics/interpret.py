# SPDX-License-Identifier: MIT
"""Run every Triton solution on CPU tensors under Triton's interpreter and print how far each case is off.

`python -m tokenspeed_kernel.numerics.interpret` sets TRITON_INTERPRET itself, before Triton is imported, so it
needs a process of its own. Prints one JSON object: solution to list of [dtype, case, distance].
"""

from __future__ import annotations

import json
import os
import sys

# Parts of the mixed steps; the interpreter is slow enough without them.
_SKIPPED = ("one decode row", "a whole prompt", "a chunk after a prefix", "long")


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
                results = check_solution(item, "cpu", keep=lambda case: not case.label.startswith(_SKIPPED))
                found[f"{op}={item.name}"] = [
                    [str(result.case.dtype), result.case.label, result.distance] for result in results
                ]
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
