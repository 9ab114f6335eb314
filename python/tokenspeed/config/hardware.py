# SPDX-License-Identifier: MIT
"""What this machine has: usable cores, available memory, GPUs. Read once at start, then passed around as a value.

`detect` imports no torch and makes no CUDA context: it asks the driver library for the devices, and the installed
torch's version file whether that build can use them. Containers are respected (cgroup v2 limits of CPU and memory).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    name: str
    total_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Hardware:
    """`num_cpus`: cores this process may use. `available_ram_bytes`: what may be taken without swapping.
    `gpus`: what the driver reports. `torch_cuda`: the CUDA version of the installed torch, None for a CPU build.
    `flashinfer`: whether its package is installed."""

    num_cpus: int
    available_ram_bytes: int
    gpus: tuple[Gpu, ...]
    torch_cuda: str | None
    flashinfer: bool = False

    @property
    def usable_gpus(self) -> tuple[Gpu, ...]:
        return self.gpus if self.torch_cuda else ()


def detect() -> Hardware:
    """Look at the machine; takes milliseconds."""
    flashinfer = importlib.util.find_spec("flashinfer") is not None
    return Hardware(_num_cpus(), available_ram_bytes(), _gpus(), torch_cuda_version(), flashinfer)


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed torch was built for, read without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    text = version_file.read_text() if version_file.exists() else ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def _num_cpus() -> int:
    usable = len(os.sched_getaffinity(0))
    quota = _words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        usable = min(usable, max(1, int(quota[0]) // int(quota[1])))
    return usable


def available_ram_bytes() -> int:
    """What may be taken now without swapping, under the container's limit."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _words("/sys/fs/cgroup/memory.max"), _words("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        available = min(available, max(0, int(limit[0]) - int(used[0])))
    return available


def _words(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().split() if file.exists() else []


def _gpus() -> tuple[Gpu, ...]:
    """The driver's devices, in the order that CUDA_VISIBLE_DEVICES leaves; none where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # ..._MINOR
    return Gpu(name.value.decode(errors="replace"), total.value, (major.value, minor.value))
