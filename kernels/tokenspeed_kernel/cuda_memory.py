# SPDX-License-Identifier: MIT
"""Device memory whose address comes first and whose pages come later: `ReservedMemory`.

A CUDA graph holds addresses, and what it costs is known only once it is captured. So the address range of a large
pool is reserved, a first page is mapped for captures to run on, and the rest is mapped when its size is decided.
The driver's virtual memory calls do this; nothing is copied and no address changes. Pages are zeroed.
The memory may be given back in between (`release`) and had again at the same addresses: an engine that sleeps.
Used on the thread that loads the model or runs its steps. Tensors keep their range alive; it goes back with the last.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

import torch

from tokenspeed_kernel.cuda_driver import driver_call

_PINNED = 1
_ON_DEVICE = 1
_READ_WRITE = 3
_RECOMMENDED = 1
_RDMA_WITH_VMM_SUPPORTED = 110


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):
    """The driver's CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class ReservedMemory:
    """One address range of at least `num_bytes` on `device`, of which a growing front part has memory.

    Raises RuntimeError with the driver's words.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._ordinal = torch.cuda.current_device() if device.index is None else device.index
        self._properties = self._allocation_properties()
        granule = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(self._properties), _RECOMMENDED)
        self._granule = granule.value
        self._reserved = self._rounded(num_bytes)
        self._mapped = 0
        self._parts: list[tuple[int, int, ctypes.c_ulonglong]] = []
        base = ctypes.c_ulonglong()
        nowhere, no_flags = ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(base),
            ctypes.c_size_t(self._reserved),
            ctypes.c_size_t(0),
            nowhere,
            no_flags,
        )
        self._base = base.value

    @property
    def mapped_bytes(self) -> int:
        """How much of the range has memory."""
        return self._mapped

    def grow(self, num_bytes: int) -> None:
        """Back at least the first `num_bytes` with zeroed memory."""
        wanted = self._rounded(num_bytes)
        if wanted > self._reserved:
            raise ValueError(f"{num_bytes} bytes were asked for and {self._reserved} are reserved")
        if wanted <= self._mapped:
            return
        start, size = self._base + self._mapped, wanted - self._mapped
        self._parts.append((start, size, self._mapped_part(start, size)))
        self._mapped = wanted
        self._bytes(start, size).zero_()

    def release(self) -> None:
        """Give the memory back and keep the addresses, which nothing may touch until `grow` backs them again. Waits for
        the device."""
        torch.cuda.synchronize(self._device)
        while self._parts:
            start, size, handle = self._parts[-1]
            self._call("cuMemUnmap", ctypes.c_ulonglong(start), ctypes.c_size_t(size))
            self._parts.pop()
            self._mapped = start - self._base
            self._call("cuMemRelease", handle)

    def _mapped_part(self, start: int, size: int) -> ctypes.c_ulonglong:
        """New memory at these addresses; its handle. Leaves nothing behind when it fails."""
        handle, where = ctypes.c_ulonglong(), ctypes.c_ulonglong(start)
        no_flags = ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._properties), no_flags)
        try:
            self._call("cuMemMap", where, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, no_flags)
            try:
                access = _Access(self._properties.location, _READ_WRITE)
                self._call("cuMemSetAccess", where, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
            except RuntimeError:
                self._call("cuMemUnmap", where, ctypes.c_size_t(size))
                raise
        except RuntimeError:
            self._call("cuMemRelease", handle)
            raise
        return handle

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The front of the range as a contiguous tensor; it must have memory. Keeps the range alive."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._mapped:
            raise ValueError(f"a tensor of {num_bytes} bytes in {self._mapped} bytes of memory")
        return self._bytes(self._base, num_bytes).view(dtype).view(shape)

    def __del__(self) -> None:
        base = getattr(self, "_base", 0)
        if not base or sys.is_finalizing():
            return  # never reserved, or the process takes it all with it
        self.release()
        self._call("cuMemAddressFree", ctypes.c_ulonglong(base), ctypes.c_size_t(self._reserved))

    def _call(self, name: str, *arguments: Any) -> None:
        driver_call(self._ordinal, name, *arguments)

    def _bytes(self, start: int, size: int) -> torch.Tensor:
        return view_of_address(start, (size,), torch.uint8, self._device, self)

    def _rounded(self, num_bytes: int) -> int:
        return -(-max(num_bytes, 1) // self._granule) * self._granule

    def _allocation_properties(self) -> _Properties:
        handle, rdma = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), self._ordinal)
        self._call("cuDeviceGetAttribute", ctypes.byref(rdma), _RDMA_WITH_VMM_SUPPORTED, handle)
        # Network cards read and write KV blocks where they lie.
        flags = _Flags(gpu_direct_rdma_capable=rdma.value)
        return _Properties(_PINNED, 0, _Location(_ON_DEVICE, self._ordinal), None, flags)


_TYPE_CODES = {torch.uint8: "|u1", torch.int32: "<i4", torch.int64: "<i8", torch.float32: "<f4"}


def view_of_address(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, owner: object
) -> torch.Tensor:
    """A contiguous tensor over memory that `owner` holds; the tensor and its views keep `owner` alive.

    dtype: uint8, int32, int64 or float32.
    """
    return torch.as_tensor(_Memory(address, shape, dtype, owner), device=device)


class _Memory:
    """What torch makes a tensor of, and holds for as long as it lives. In no cycle: a collector does not see what
    torch holds, so `owner` would be freed one collection late."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": _TYPE_CODES[dtype],
            "data": (address, False),
            "version": 2,
        }
