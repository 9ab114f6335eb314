# SPDX-License-Identifier: MIT
"""Native calls of a function on CPU tensors, recorded once and played back without Python: a CPU's CUDA graph.

While `record` runs a function, each `_cpu` kernel is added to the recording after it has run. torch may allocate and
make views meanwhile, nothing else: what it computes would be missing from later plays, so a recording with any of it is
refused, but for zeros, copies and sums, for which there are kernels. A play reads and writes the same addresses. What
the function allocates comes from a `Workspace` that recordings share: memory that the function gives back is used again
by what it allocates next, in every play alike. Weights, caches, inputs and constants are kept with the recording.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from tokenspeed_kernel import _cpu

_ATEN = torch.ops.aten
_ALLOCATIONS = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
_ZEROS = {_ATEN.zeros, _ATEN.zeros_like, _ATEN.new_zeros}
_VALUES = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__}
"""Ways of reading numbers that pass by the dispatcher."""


class Workspace:
    """Memory of recordings that are played one after the other, kept as long as one of them."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._addresses: set[int] = set()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory that was taken."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the same layout, without values. Its memory is taken again once nobody refers to it."""
        num_bytes = like.untyped_storage().nbytes()
        if num_bytes == 0:
            return like
        free = self._free.setdefault(num_bytes, [])
        memory = free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8)
        self._addresses.add(memory.data_ptr())
        window = memory.numpy()  # dies with the last tensor that sees it
        weakref.finalize(window, free.append, memory).atexit = False
        return torch.from_numpy(window).view(like.dtype).as_strided(like.shape, like.stride())


class Recorded:
    """What a function did: `play` does it again and leaves `result`, the same tensor every time."""

    def __init__(
        self, calls: _cpu.Recording, result: torch.Tensor, workspace: Workspace, others: list[torch.Tensor]
    ) -> None:
        self._calls = calls
        self._workspace = workspace
        self._others = others
        self.result = result

    def __len__(self) -> int:
        """Kernels of a play."""
        return len(self._calls)

    def play(self) -> torch.Tensor:
        """Raises ValueError as the kernels do, for numbers out of range."""
        self._calls.play()
        return self.result


def record(function: Callable[[], torch.Tensor], workspace: Workspace) -> tuple[torch.Tensor, Recorded | str]:
    """Run the function; its result, and the recording, or what forbids one.

    function: reads and writes the same tensors whenever it is called, of sizes that depend on nothing but itself.
    """
    from tokenspeed_kernel import _cpu  # a machine for GPUs may have none

    calls = _cpu.Recording()
    watch = _Watch(workspace, _cpu)
    calls.start()
    try:
        with watch, _Values(watch):
            result = function()
    finally:
        _cpu.Recording.stop()
    if watch.forbidden is not None:
        return result, watch.forbidden
    return result, Recorded(calls, result, workspace, watch.others)


class _Watch(TorchDispatchMode):
    """Sees every operation of torch; runs all, whether it may be recorded or not."""

    def __init__(self, workspace: Workspace, kernels: ModuleType) -> None:
        super().__init__()
        self.forbidden: str | None = None
        self.others: list[torch.Tensor] = []
        """What kernels read and write outside of the workspace."""
        self._workspace = workspace
        self._kernels = kernels

    def forbid(self, what: str) -> None:
        """Of several the first is told."""
        self.forbidden = self.forbidden or what

    def keep(self, *tensors: torch.Tensor) -> None:
        """A play reads or writes them."""
        self.others += [tensor for tensor in tensors if not self._workspace.owns(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)  # a reshape may be a view or a copy
        if parts is not NotImplemented:
            return parts
        out, packet = func(*args, **kwargs), func.overloadpacket
        if func._schema.is_mutable and packet is not _ATEN.copy_:
            self.forbid(str(func))
            return out
        if packet in _ALLOCATIONS:
            return self._workspace.take(out)
        if packet in _ZEROS:
            out = self._workspace.take(out)
            self._kernels.clear(out.data_ptr(), out.untyped_storage().nbytes())
        elif packet is _ATEN.clone:
            out = self._workspace.take(out)
            self._copy(args[0], out)
        elif packet is _ATEN.copy_:
            self._copy(args[1], args[0])
        elif packet is _ATEN.cat:
            out = self._workspace.take(out)
            self._join(args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0), out)
        elif func is _ATEN.add.Tensor and not kwargs and _plain(*args):
            out = self._workspace.take(out)
            self.keep(*args)
            self._kernels.add(args[0].data_ptr(), args[1].data_ptr(), out.data_ptr(), out.numel())
        elif not func.is_view and packet is not _ATEN._unsafe_view:
            self.forbid(str(func))
        return out

    def _join(self, parts: list[torch.Tensor], dim: int, out: torch.Tensor) -> None:
        parts = [part for part in parts if part.numel()]  # one without elements may have any shape
        if not parts:
            return
        places = out.split([part.shape[dim] for part in parts], dim)
        for part, place in zip(parts, places, strict=True):
            self._copy(part, place)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """By rows of adjacent elements."""
        alike = source.dtype is target.dtype and source.shape == target.shape and source.dim() > 0
        if not alike or source.is_neg() or source.stride(-1) != 1 or target.stride(-1) != 1:
            self.forbid(f"a copy of {source.dtype} {source.stride()} to {target.dtype} {target.stride()}")
            target.copy_(source)
            return
        self.keep(source, target)
        if source.dim() == 1:
            source, target = source[None], target[None]
        size = source.element_size()
        for index in itertools.product(*map(range, source.shape[:-2])):
            rows, places = source[index], target[index]
            self._kernels.copy_rows(
                rows.data_ptr(),
                rows.stride(0) * size,
                places.data_ptr(),
                places.stride(0) * size,
                rows.shape[0],
                rows.shape[1] * size,
            )


def _plain(x: Any, y: Any) -> bool:
    """Whether both are contiguous float32 tensors of one shape."""
    both = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape
    return both and all(part.dtype is torch.float32 and part.is_contiguous() for part in (x, y))


class _Values(TorchFunctionMode):
    """Sees what reads a tensor's numbers into Python, and what asks where they are."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VALUES:
            self._watch.forbid(f"torch.Tensor.{func.__name__}")
        elif func is torch.Tensor.data_ptr:
            self._watch.keep(args[0])
        return func(*args, **(kwargs or {}))
