# SPDX-License-Identifier: MIT
"""Which solution runs an operation: declaration, platform, selection, override and explanation.

A family module decorates its solutions with `@kernel(...)`; `api` asks an `Op` for the solution that fits a call.
The answer is cached per (device, dtype, traits), so a warm call costs one dictionary look-up. The registry holds
no tensors and starts no threads; reading it from several threads is safe, registering is done while importing.
"""

from tokenspeed_kernel.registry import ops
from tokenspeed_kernel.registry.errors import KernelError
from tokenspeed_kernel.registry.platform import Platform, current_platform
from tokenspeed_kernel.registry.requirements import Requirement, anywhere, cpu, cuda
from tokenspeed_kernel.registry.selection import (
    OVERRIDES_ENV,
    Verdict,
    explain,
    forget_tuning,
    override,
    parse_overrides,
    select,
    set_overrides,
    solutions,
    solve,
)
from tokenspeed_kernel.registry.spec import Band, KernelSpec, Op, Signature, declare_op, kernel, operations

__all__ = [
    "OVERRIDES_ENV",
    "Band",
    "KernelError",
    "KernelSpec",
    "Op",
    "Platform",
    "Requirement",
    "Signature",
    "Verdict",
    "anywhere",
    "cpu",
    "cuda",
    "current_platform",
    "declare_op",
    "explain",
    "forget_tuning",
    "kernel",
    "operations",
    "ops",
    "override",
    "parse_overrides",
    "select",
    "set_overrides",
    "solutions",
    "solve",
]
