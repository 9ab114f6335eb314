# SPDX-License-Identifier: MIT
"""Giving the memory of weights and KV blocks back while an engine stands still, and having it again: sleep and wake.

`RankMemory` does it on every rank at the same point between two turns; what a rank does is an `Occupation`, one for the
CPU and one for GPUs, where captured steps hold addresses, so memory goes and comes underneath them. Only the engine's
own pausing keeps steps away meanwhile. Nothing here knows requests.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from typing import Protocol

import torch

from tokenspeed.engine.errors import OperationError
from tokenspeed.engine.kv_pool import KVCaches, ReservedPool
from tokenspeed.engine.loop import EngineLoop
from tokenspeed.engine.new_weights import OnLoop
from tokenspeed.engine.placed_weights import PlacedWeights
from tokenspeed.engine.ranks import Ranks
from tokenspeed.engine.runner import ABSENT_MODEL, ModelRunner

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)

_WHAT = "memory"


class Occupation(Protocol):
    """A rank's memory by tag. Called on the loop's thread, with nothing in flight."""

    def release(self, tag: str, keep: bool) -> bool:
        """Give it back, if that was not done already. keep: the values of weights in the host's memory, where that is
        another; whether they are kept."""

    def resume(self, tag: str) -> None:
        """Have it again: KV blocks zeroed, weights as kept, or else without values. Raises RuntimeError when there is
        no room, and then nothing has changed."""


class HostOccupation:
    """Of a CPU. Weights are dropped and come with a model that is loaded, so for them there is nothing to resume. Pages
    of KV blocks go back from under the tensors, whose addresses others hold too, and come back when written to."""

    def __init__(self, runner: ModelRunner, caches: KVCaches) -> None:
        self._runner = runner
        self._caches = caches

    def release(self, tag: str, keep: bool) -> bool:
        if tag == WEIGHTS:
            self._runner.replace_model(ABSENT_MODEL)
            trim_freed_memory()
            return False
        for layer in self._caches:
            for tensor in layer:
                _discard(tensor)
        return False

    def resume(self, tag: str) -> None:
        return


class DeviceOccupation:
    """Of a GPU."""

    def __init__(self, pool: ReservedPool, num_blocks: int, weights: PlacedWeights) -> None:
        self._pool = pool
        self._num_blocks = num_blocks
        self._weights = weights

    def release(self, tag: str, keep: bool) -> bool:
        if tag == KV_CACHE:
            self._pool.release()
        else:
            self._weights.release(keep)
        torch.cuda.empty_cache()
        return keep and tag == WEIGHTS

    def resume(self, tag: str) -> None:
        if tag == KV_CACHE:
            self._pool.grow(self._num_blocks)
        else:
            self._weights.resume()


class RankMemory:
    """The memory of all ranks. own: this one's; None where the engine was not started for it."""

    def __init__(self, loop: EngineLoop, ranks: Ranks, own: Occupation | None) -> None:
        self.asleep: set[str] = set()
        """What is released; on the first rank."""
        self.keeps = False
        """Whether weights that sleep are kept in the host's memory."""
        self._loop = loop
        self._ranks = ranks
        self._own = own
        if not ranks.leads and own is not None:
            ranks.does("release_memory", self._released)
            ranks.does("resume_memory", self._resumed)

    @property
    def can_sleep(self) -> bool:
        return self._own is not None

    def release(self, tag: str, keep: bool) -> None:
        """On the loop's thread, with nothing in flight."""
        assert self._own is not None
        self._loop.mirror.operated("release_memory", tag, keep)
        kept = self._own.release(tag, keep)
        self.asleep.add(tag)
        if tag == WEIGHTS:
            self.keeps = kept

    def resume(self, tag: str, on_loop: OnLoop) -> None:
        """On a caller's thread; does nothing for what is awake. Raises OperationError when a rank has no room; then
        none has it, and what was kept is kept."""
        if tag not in self.asleep:
            return
        failure = on_loop(lambda: self._resume(tag))
        failures = [text for text in self._ranks.gather(_WHAT, failure) if text is not None]
        if failures:
            on_loop(lambda: self.release(tag, self.keeps))
            raise OperationError(503, f"{tag}: there is no room for it yet, it sleeps on: {failures[0]}")
        self.asleep.discard(tag)

    def _released(self, tag: str, keep: bool) -> None:
        """On another rank."""
        assert self._own is not None
        self._own.release(tag, keep)

    def _resume(self, tag: str) -> str | None:
        self._loop.mirror.operated("resume_memory", tag)
        return self._tried(tag)

    def _resumed(self, tag: str) -> None:
        """On another rank."""
        self._ranks.gather(_WHAT, self._tried(tag))

    def _tried(self, tag: str) -> str | None:
        assert self._own is not None
        try:
            self._own.resume(tag)
        except (RuntimeError, MemoryError) as error:
            return str(error) or type(error).__name__
        return None


def _discard(tensor: torch.Tensor) -> None:
    """Zero a contiguous tensor of the host's own memory by giving its pages back."""
    data = tensor.view(-1).view(torch.uint8)
    start, size = data.data_ptr(), len(data)
    first = min(-start % mmap.PAGESIZE, size)
    whole = (size - first) // mmap.PAGESIZE * mmap.PAGESIZE
    gone = sys.platform == "linux" and whole > 0
    if gone:
        gone = not _libc().madvise(ctypes.c_void_p(start + first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)
    if gone:
        data[:first].zero_()
        data[first + whole :].zero_()
    else:
        data.zero_()


def trim_freed_memory() -> None:
    """Have the C library give freed pages back, which it may keep for later."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
