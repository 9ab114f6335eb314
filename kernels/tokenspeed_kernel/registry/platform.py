# SPDX-License-Identifier: MIT
"""What this machine can run: the CPU's instruction sets and the GPU's compute capability.

Read once per process and passed around as a value, so selection can be tested for machines nobody has at hand.
"""

from __future__ import annotations

import functools
import platform as host
from dataclasses import dataclass
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Platform:
    """One machine as selection sees it.

    cpu_arch: machine name as the kernel reports it, such as "x86_64" or "aarch64".
    cpu_features: lower-case instruction-set names as Linux spells them ("avx2", "fma", "avx512f", ...).
    cuda_capability: (major, minor) of the current GPU, None where there is none.
    cuda_name: the GPU's name, empty where there is none.
    """

    cpu_arch: str
    cpu_features: frozenset[str]
    cuda_capability: tuple[int, int] | None
    cuda_name: str = ""

    def has_device(self, device: str) -> bool:
        """Whether tensors of torch device type `device` can exist here."""
        return device == "cpu" or (device == "cuda" and self.cuda_capability is not None)

    def describe(self) -> str:
        """The machine in one line, for `explain`."""
        levels = [
            name for name in ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16") if name in self.cpu_features
        ]
        cpu = f"cpu {self.cpu_arch} ({', '.join(levels) or 'baseline'})"
        if self.cuda_capability is None:
            return f"{cpu}; no cuda device"
        major, minor = self.cuda_capability
        return f"{cpu}; cuda {self.cuda_name} sm_{major}{minor}"


def parse_cpu_features(cpuinfo: str) -> frozenset[str]:
    """Instruction-set names of the first processor in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.lower().split())
    return frozenset()


@functools.cache
def current_platform() -> Platform:
    """The machine this process runs on."""
    features = parse_cpu_features(_CPUINFO.read_text()) if _CPUINFO.exists() else frozenset()
    if not torch.cuda.is_available():
        return Platform(host.machine(), features, None)
    device = torch.cuda.current_device()
    return Platform(
        host.machine(), features, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    )
