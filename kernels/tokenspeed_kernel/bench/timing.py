# SPDX-License-Identifier: MIT
"""How long a call takes, and what the machine could do at most; nothing here knows an operation.

On a GPU, calls are captured in a CUDA graph and timed by events, so launch overhead of Python is left out, as it is
in the engine's decode steps. Calls rotate over copies of their arguments, so that caches hold none from the last.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], object]


class Ceiling(NamedTuple):
    """Measured limits of this machine: bytes/s of a large copy (read plus write), flop/s of a large product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: float, num_flops: float) -> float:
        """The least time that such traffic and arithmetic could take."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def seconds_per_call(calls: Sequence[Call], device: str, budget_s: float = 0.2) -> float:
    """Median time of one call, over rounds that run every one of `calls` once."""
    return _cuda_seconds(calls, budget_s) if device == "cuda" else _cpu_seconds(calls, budget_s)


def _cpu_seconds(calls: Sequence[Call], budget_s: float) -> float:
    for call in calls:
        call()
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 3 or time.perf_counter() < end:
        for call in calls:
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 2]


def _cuda_seconds(calls: Sequence[Call], budget_s: float) -> float:
    torch.cuda.synchronize()  # the arguments may still be in the making
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles and loads what the capture must not
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 16 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 5 or time.perf_counter() < end:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) / 1e3 / (repeats * len(calls)))
    return sorted(samples)[len(samples) // 2]


@functools.cache
def ceiling(device: str, dtype: torch.dtype) -> Ceiling:
    """Measure this machine once per dtype; takes about a second."""
    size = 2**30 if device == "cuda" else 2**27
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_per_call([lambda: target.copy_(source)], device)
    edge = 8192 if device == "cuda" else 1024
    left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    product_s = seconds_per_call([lambda: torch.mm(left, right, out=product)], device)
    return Ceiling(2 * size / copy_s, 2 * edge**3 / product_s)
