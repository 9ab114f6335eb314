# SPDX-License-Identifier: MIT
"""`ts env`: what a bug report needs, read without starting anything."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from tokenspeed.config import hardware
from tokenspeed.version import __version__

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "pyzmq",
    "msgspec",
    "aiohttp",
    "jinja2",
    "prometheus_client",
    "grpcio",
    "xgrammar",
    "llguidance",
    "transformers",
    "flashinfer-python",
    "mooncake-transfer-engine-cuda13",
)


def report() -> str:
    """One `name: value` a line."""
    machine = hardware.detect()
    lines = {
        "tokenspeed": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        "CPU": f"{_cpu_model()}, {machine.num_cpus} usable cores",
        "RAM available": f"{machine.available_ram_bytes / 2**30:.1f} GiB",
        "torch CUDA": machine.torch_cuda or "none (CPU build)",
    }
    for index, gpu in enumerate(machine.gpus):
        major, minor = gpu.capability
        lines[f"GPU {index}"] = f"{gpu.name}, {gpu.total_bytes / 2**30:.1f} GiB, sm_{major}{minor}"
    if not machine.gpus:
        lines["GPU"] = "none"
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
