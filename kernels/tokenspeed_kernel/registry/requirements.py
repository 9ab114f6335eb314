# SPDX-License-Identifier: MIT
"""What a solution needs of the machine, as a value that can say in words why it is not met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed_kernel.registry.platform import Platform


@dataclass(frozen=True)
class Requirement:
    """A device type and a predicate on the platform.

    device: torch device type the solution's tensors live on; None for any.
    check: returns None when the platform will do, else the reason in words.
    """

    device: str | None
    check: Callable[[Platform], str | None]

    def unmet(self, platform: Platform) -> str | None:
        """Why `platform` cannot run the solution, or None when it can."""
        if self.device is not None and not platform.has_device(self.device):
            return f"needs a {self.device} device, this machine has none"
        return self.check(platform)


def anywhere() -> Requirement:
    """Runs on every device torch knows."""
    return Requirement(None, lambda _: None)


def cpu(*features: str) -> Requirement:
    """Runs on CPU tensors where every named instruction set exists, such as cpu("avx2", "fma")."""

    def check(platform: Platform) -> str | None:
        missing = [feature for feature in features if feature not in platform.cpu_features]
        return f"needs cpu {', '.join(missing)}" if missing else None

    return Requirement("cpu", check)


def cuda(
    major: int, minor: int = 0, *, only_major: bool = False, also: Callable[[Platform], str | None] | None = None
) -> Requirement:
    """Runs on CUDA tensors where the capability is at least `major.minor`.

    only_major: machine code that a later major capability cannot run.
    also: one more check once the capability fits, such as for a compiled file; returns why it fails, or None.
    """

    def check(platform: Platform) -> str | None:
        have = platform.cuda_capability
        if have is None:
            return "needs a cuda device, this machine has none"
        if have < (major, minor) or (only_major and have[0] != major):
            bound = "" if only_major else " or later"
            return f"needs compute capability {major}.{minor}{bound}, this GPU has {have[0]}.{have[1]}"
        return also(platform) if also is not None else None

    return Requirement("cuda", check)
