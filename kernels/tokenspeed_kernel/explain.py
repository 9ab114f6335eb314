# SPDX-License-Identifier: MIT
"""Who runs an operation on this machine and why the others do not: the text of `ts kernels explain`.

Also `python -m tokenspeed_kernel.explain OP [device=cuda] [dtype=bfloat16] [batch_invariant=true] [trait=value ...]`;
without an operation it lists all of them. Exit status 2 and one line on stderr for a bad argument.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

from tokenspeed_kernel.registry import KernelError, current_platform, explain, operations, solutions

_KEYWORDS = {"device", "dtype"}


def explain_text(op: str, arguments: Sequence[str] = ()) -> str:
    """A table of solutions for `op`, best first; arguments are "name=value" parts of the call's signature.

    Raises KernelError for an unknown operation, trait or dtype, or a part that is not name=value.
    """
    signature: dict[str, Hashable] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not (name and equals and value):
            raise KernelError(f"{argument!r} must read NAME=VALUE")
        signature[name] = value if name in _KEYWORDS else _value(value)
    if not isinstance(signature.get("batch_invariant", True), bool):
        raise KernelError(f"batch_invariant must be true or false, got {signature['batch_invariant']}")
    signature.setdefault("device", "cpu" if current_platform().cuda_capability is None else "cuda")
    verdicts = explain(op, **signature)  # type: ignore[arg-type]
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    lines = [f"{op} on {current_platform().describe()}", f"call: {_call(signature)}"]
    lines += [f"  {verdict.verdict:<9}{verdict.name:<{width}}  {verdict.reason}" for verdict in verdicts]
    return "\n".join(lines)


def list_text() -> str:
    """Every operation with its traits and the names of its solutions, best rank first."""
    lines = [current_platform().describe()]
    for name, op in sorted(operations().items()):
        lines.append(f"{name}: {op.summary}")
        lines.append(f"  traits: {', '.join(op.trait_names) or 'none'}")
        lines.append(f"  solutions: {', '.join(item.name for item in solutions(name))}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print to stdout; returns the exit status."""
    try:
        print(explain_text(arguments[0], arguments[1:]) if arguments else list_text())
    except KernelError as error:
        print(f"ts kernels explain: error: {error}", file=sys.stderr)
        return 2
    return 0


def _value(text: str) -> Hashable:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text


def _call(signature: dict[str, Hashable]) -> str:
    return ", ".join(f"{name}={value}" for name, value in signature.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
