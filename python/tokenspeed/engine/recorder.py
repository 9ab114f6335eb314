# SPDX-License-Identifier: MIT
"""CUDA graphs of one engine: captured on one stream, from one pool of memory, played back in the order of steps.

Steps follow each other on one stream, so what one graph leaves behind may be overwritten by the next: the pool is
shared, and results are handed out as aliases that keep no memory from being used again.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from tokenspeed_kernel import api


class CudaRecorder:
    """Use it on one thread, while nothing else runs on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where captures happen; what must happen once before one belongs there too."""
        return self._stream

    def captures(self) -> Generator[torch.cuda.CUDAGraph, None, None]:
        """One graph after the other, each capturing until the next is asked for or the generator is closed."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            while True:
                graph = torch.cuda.CUDAGraph()
                # Other threads may ask the driver what they like: NCCL's watch asks about earlier collectives.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield graph
                finally:
                    graph.capture_end()
                    current.wait_stream(self._stream)


def alias(tensor: torch.Tensor, owner: object) -> torch.Tensor:
    """The same memory seen by a tensor that does not keep it from its allocator; `owner` must keep the pool."""
    if not tensor.is_cuda:
        return tensor
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    num_bytes = (steps + 1) * tensor.element_size()
    base = api.view_of_address(tensor.data_ptr(), (num_bytes,), torch.uint8, tensor.device, owner)
    return base.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
