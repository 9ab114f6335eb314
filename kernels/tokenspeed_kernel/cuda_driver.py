# SPDX-License-Identifier: MIT
"""Loading our compiled CUDA kernels and launching them on torch's stream, through the driver API.

A fatbin beside its source in csrc/cuda holds machine code for the GPUs we name; there is no PTX in it, so nothing
is compiled at run time. `CudaModule` opens one lazily, once per device, in torch's (primary) context. Launches are
asynchronous and may be captured in a CUDA graph; failures are RuntimeError with the driver's own words.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tokenspeed_kernel.registry import Platform

_FATBIN_FOLDER = Path(__file__).parent / "csrc" / "cuda"
_FATBIN_MAGIC = 0xBA55ED50
_MACHINE_CODE = 2
_ONE_ARCH_ONLY = 1 << 20


class Image(NamedTuple):
    """One machine-code image of a fatbin. exact: made for that capability alone, as sm_90a is."""

    major: int
    minor: int
    exact: bool

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Machine code runs on its own major capability from its minor on."""
        if self.exact:
            return capability == (self.major, self.minor)
        return capability[0] == self.major and capability[1] >= self.minor


def read_fatbin(path: Path) -> list[Image]:
    """The machine-code images in a fatbin file; ValueError when it is not one."""
    data = path.read_bytes()
    if len(data) < 16 or struct.unpack_from("<I", data)[0] != _FATBIN_MAGIC:
        raise ValueError(f"{path} is not a fatbin")
    images = []
    at = 16
    while at < len(data):
        kind, _, header_size, size = struct.unpack_from("<HHIQ", data, at)
        arch, flags = struct.unpack_from("<I8xI", data, at + 28)
        if kind == _MACHINE_CODE:
            images.append(Image(arch // 10, arch % 10, bool(flags & _ONE_ARCH_ONLY)))
        at += header_size + size
    return images


def fatbin_for(name: str) -> Callable[[Platform], str | None]:
    """A check for `needs`: the fatbin of csrc/cuda/NAME.cu is built and holds code for the platform's GPU."""

    def check(platform: Platform) -> str | None:
        path = _FATBIN_FOLDER / f"{name}.fatbin"
        if not path.exists():
            return f"csrc/cuda/{name}.fatbin is not built; run tools/build_native.sh cuda"
        capability = platform.cuda_capability
        if capability is None or not any(image.runs_on(capability) for image in read_fatbin(path)):
            return f"csrc/cuda/{name}.fatbin holds no code for this GPU; set CUDA_ARCHS and build again"
        return None

    return check


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the driver API."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


# Values of the driver API's enumerations.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PREFERRED_SHARED_PERCENT = 9
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_BFLOAT16, _NOT_INTERLEAVED, _SWIZZLE_128_BYTES, _PROMOTE_256_BYTES, _OUTSIDE_IS_ZERO = 9, 0, 3, 3, 0
_TENSOR_MAP_ALIGNMENT = 64
_OVERLAPPED = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")


@functools.cache
def _overlaps(ordinal: int) -> bool:
    return torch.cuda.get_device_capability(ordinal) >= (9, 0)


class CudaModule:
    """The kernels of one fatbin. shared_bytes: of dynamic shared memory that each launch gets.

    shared_percent: how much of the memory that shared memory and the first-level cache have in common is to be shared
        memory; None: as the kernel ahead left it, where that will do.
    """

    def __init__(self, name: str, shared_bytes: int = 0, shared_percent: int | None = None) -> None:
        self._shared_bytes = shared_bytes
        self._shared_percent = shared_percent
        self._path = _FATBIN_FOLDER / f"{name}.fatbin"
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}
        self._modules: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    def launch(
        self, function: str, device: torch.device, num_blocks: int, num_threads: int, arguments: Sequence[Any]
    ) -> None:
        """Start `function` on torch's current stream of `device`; arguments are ctypes values.

        On GPUs that can, its blocks may start before the kernel ahead has ended, as CUDA's programmatic dependent
        launch allows: every kernel of ours waits for that end itself (vector.cuh, WaitForPrevious).
        """
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        _use_device(ordinal)
        handle = self._functions.get((ordinal, function)) or self._find(ordinal, function)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = torch.cuda.current_stream(ordinal).cuda_stream
        sizes = (num_blocks, 1, 1, num_threads, 1, 1, self._shared_bytes)
        config = _LaunchConfig(*sizes, stream, ctypes.pointer(_OVERLAPPED), int(_overlaps(ordinal)))
        _call("cuLaunchKernelEx", ctypes.byref(config), handle, pointers, None)

    def _find(self, ordinal: int, function: str) -> ctypes.c_void_p:
        with self._lock:
            if ordinal not in self._modules:
                module = ctypes.c_void_p()
                _call("cuModuleLoadData", ctypes.byref(module), self._path.read_bytes())
                self._modules[ordinal] = module
            handle = ctypes.c_void_p()
            _call("cuModuleGetFunction", ctypes.byref(handle), self._modules[ordinal], function.encode())
            if self._shared_bytes:
                _call("cuFuncSetAttribute", handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, self._shared_bytes)
            if self._shared_percent is not None:
                _call("cuFuncSetAttribute", handle, _PREFERRED_SHARED_PERCENT, self._shared_percent)
            self._functions[ordinal, function] = handle
            return handle


class TensorMap(ctypes.Structure):
    """CUtensorMap of the driver API, the description of a tensor that Hopper's copy engine reads."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


_LONGEST = 1 << 31


def swizzled_cache(cache: torch.Tensor, box_rows: int) -> TensorMap:
    """As `swizzled_rows` of a KV cache [..., D], all dimensions but the last one taken together.

    The map has no end: a captured step keeps the one it was captured with, when the pool had one block yet and nothing
    but its address was final. Boxes must lie within blocks that a block table names.
    """
    columns = cache.shape[-1]
    return _encode(cache.data_ptr(), (columns, _LONGEST), (2 * columns,), (64, box_rows))


def swizzled_cache_panels(cache: torch.Tensor, box_rows: int) -> TensorMap:
    """As `swizzled_panels` of a KV cache, without an end as `swizzled_cache`."""
    columns = cache.shape[-1]
    panels = columns // 64
    return _encode(cache.data_ptr(), (64, panels, _LONGEST), (128, 2 * columns), (64, panels, box_rows))


def swizzled_rows(rows: torch.Tensor, box_rows: int) -> TensorMap:
    """How to copy boxes of 64 columns and `box_rows` rows out of a matrix of 2-byte floats.

    Elements of a row are adjacent; rows begin at multiples of 16 bytes. In shared memory a row of a box has 128 bytes,
    and its 16-byte pieces lie permuted (hopper.cuh). What lies outside of the matrix is read as zero.
    """
    num_rows, num_columns = rows.shape
    stride = rows.stride(0) if num_rows > 1 else num_columns
    return _encode(rows.data_ptr(), (num_columns, num_rows), (2 * stride,), (64, box_rows))


def swizzled_heads(tokens: torch.Tensor, box_heads: int, box_tokens: int) -> TensorMap:
    """How to copy boxes of 64 columns of some heads of some tokens out of [T, H, D] of 2-byte floats, whose heads and
    tokens may lie apart. What is past the last head or token is zero."""
    num_tokens, num_heads, num_columns = tokens.shape
    sizes, strides = (num_columns, num_heads, num_tokens), (2 * tokens.stride(1), 2 * tokens.stride(0))
    return _encode(tokens.data_ptr(), sizes, strides, (64, box_heads, box_tokens))


def swizzled_panels(rows: torch.Tensor, *box: int) -> TensorMap:
    """How to copy boxes of whole rows out of [..., D] of 2-byte floats, D a multiple of 64; `box`: from the last
    dimension but one on, how many of each. A row comes as it lies, each 64 columns of it a row of 128 bytes in shared
    memory, whose 16-byte pieces lie permuted (hopper.cuh)."""
    panels = rows.shape[-1] // 64
    sizes = (64, panels, *rows.shape[-2::-1])
    strides = (128, *(2 * stride for stride in rows.stride()[-2::-1]))
    return _encode(rows.data_ptr(), sizes, strides, (64, panels, *box))


@functools.lru_cache(maxsize=1 << 14)
def _encode(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    """sizes: elements, the innermost dimension first. strides: bytes, of every dimension but that."""
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _TENSOR_MAP_ALIGNMENT)
    aligned = -(-ctypes.addressof(memory) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
    rank = len(sizes)
    _call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(aligned), _BFLOAT16, rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*(1,) * rank),
        _NOT_INTERLEAVED, _SWIZZLE_128_BYTES, _PROMOTE_256_BYTES, _OUTSIDE_IS_ZERO,
    )  # fmt: skip
    return TensorMap.from_buffer_copy((ctypes.c_char * ctypes.sizeof(TensorMap)).from_address(aligned))


_thread = threading.local()


def _use_device(ordinal: int) -> None:
    """Make torch's context of the device current in this thread, which torch itself does only when it must."""
    if getattr(_thread, "ordinal", None) == ordinal:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), ordinal)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)
    _thread.ordinal = ordinal


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()} ({status})")


def driver_call(ordinal: int, name: str, *arguments: Any) -> None:
    """Call a function of the driver in torch's context of device `ordinal`; RuntimeError with its words on failure."""
    _use_device(ordinal)
    _call(name, *arguments)
