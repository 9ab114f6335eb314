# SPDX-License-Identifier: MIT
"""What operators and trainers do to a running engine: flush, pause, abort, profile, put to sleep and wake.

Each method is called on an endpoint's thread and reaches the loop through `LoopCalls`, so everything that the loop
owns is touched between two turns. What cannot be done is an `OperationError` with an HTTP status, and nothing has
changed then. `updates` is what puts other weights in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from tokenspeed.engine.errors import RETRY, OperationError
from tokenspeed.engine.loop import EngineLoop, nothing
from tokenspeed.engine.loop_calls import LoopCalls
from tokenspeed.engine.messages import LoadNumbers
from tokenspeed.engine.occupation import KV_CACHE, TAGS, WEIGHTS, RankMemory
from tokenspeed.engine.profiler import ProfileRefused, profile_options
from tokenspeed.engine.weight_updates import WeightUpdates

PAUSE_MODES = ("abort", "wait", "keep")
_POLL_S = 0.02


class Operations:
    def __init__(self, loop: EngineLoop, calls: LoopCalls, updates: WeightUpdates, memory: RankMemory) -> None:
        self.calls = calls
        self.updates = updates
        self._loop = loop
        self._memory = memory
        self._paused_by_operator = False
        updates.on_awake = self._go_on

    @property
    def weight_version(self) -> str:
        return self._loop.weight_name

    @property
    def model_path(self) -> str:
        return str(self.updates.weights.source.path)

    def flush_cache(self) -> None:
        """Raises OperationError while a request holds blocks."""
        if not self.calls.call(self._loop.flush_cache):
            raise OperationError(409, "requests are running; nothing was flushed")

    def pause(self, mode: str, timeout_s: float) -> None:
        """Returns once nothing runs any more. wait: running requests finish first, new ones queue. abort: all that are
        here end. keep: all stay where they are. Raises OperationError when it takes longer; it is paused then."""
        if mode not in PAUSE_MODES:
            raise OperationError(400, f"mode {mode!r} is not one of {', '.join(PAUSE_MODES)}")
        self._paused_by_operator = True
        if not self._come_to_rest(mode, timeout_s):
            raise OperationError(504, f"paused, and requests are still running after {timeout_s:g} s")

    @property
    def is_paused(self) -> bool:
        return self._loop.is_paused

    def resume(self) -> None:
        """Raises OperationError while anything sleeps."""

        def resume() -> None:
            if self._memory.asleep:
                what = " and ".join(sorted(self._memory.asleep))
                raise OperationError(409, f"asleep: {what}; POST /resume_memory_occupation first")
            self._paused_by_operator = False
            self._loop.resume()

        self.calls.call(resume)

    @property
    def asleep(self) -> Collection[str]:
        """Tags of what is released."""
        return self._memory.asleep

    def release_memory(self, tags: Collection[str], mode: str, keep: bool, timeout_s: float) -> None:
        """Give the memory of these back, once nothing runs; requests that come wait until all is awake again.

        mode: as `pause` has it, unless the engine is paused already. keep: weights in the host's memory, to wake
        faster. Raises OperationError, and nothing sleeps that did not before.
        """
        self._check_tags(tags)
        new = [tag for tag in TAGS if tag in tags and tag not in self._memory.asleep]
        if mode not in PAUSE_MODES:
            raise OperationError(400, f"mode {mode!r} is not one of {', '.join(PAUSE_MODES)}")
        if mode == "keep" and KV_CACHE in new:
            raise OperationError(400, "mode keep: requests would lose their KV blocks; release the weights alone so")
        with self.updates.exclusive():
            try:
                if not self._loop.is_paused and not self._come_to_rest(mode, timeout_s):
                    raise OperationError(504, f"nothing was released: requests still run after {timeout_s:g} s")
                self.calls.call(lambda: self._fall_asleep(new, keep))
            except OperationError:
                self._go_on()
                raise

    def resume_memory(self, tags: Collection[str]) -> None:
        """Have it again: KV blocks empty, weights as they were. The engine goes on once nothing sleeps, unless an
        operator has paused it. Raises OperationError, and what could not wake sleeps on."""
        self._check_tags(tags)
        with self.updates.exclusive():
            if WEIGHTS in tags and WEIGHTS in self._memory.asleep:
                if self._memory.keeps:
                    self._memory.resume(WEIGHTS, self.calls.call)
                else:
                    self.updates.read_again()
            if KV_CACHE in tags:
                self._memory.resume(KV_CACHE, self.calls.call)
            self._go_on()

    def _check_tags(self, tags: Collection[str]) -> None:
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown:
            raise OperationError(400, f"tags: {unknown[0]!r} is not one of {', '.join(TAGS)}")
        if not self._memory.can_sleep:
            raise OperationError(501, "memory cannot be given back: start the engine with --enable-memory-saver")

    def _fall_asleep(self, tags: list[str], keep: bool) -> None:
        """On the loop's thread."""
        if not self._loop.is_paused:
            raise OperationError(RETRY, "nothing was released: somebody let the engine go on meanwhile")
        self._loop.come_to_rest()
        if KV_CACHE in tags and not self._loop.flush_cache():
            raise OperationError(RETRY, "kv_cache: paused requests hold blocks: let them go on, or abort them, first")
        for tag in tags:
            self._memory.release(tag, keep)

    def _go_on(self) -> None:
        def resume() -> None:
            if not self._memory.asleep and not self._paused_by_operator:
                self._loop.resume()

        self.calls.call(resume)

    def _come_to_rest(self, mode: str, timeout_s: float) -> bool:
        """Pause; whether nothing ran any more in time."""
        self.calls.call(lambda: self._loop.pause(mode))
        deadline_s = time.monotonic() + timeout_s
        while not self.calls.call(lambda: self._loop.is_at_rest(mode)):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def abort(self, rid: str) -> int:
        """End a request and its choices (`rid-0`, `rid-1`); how many there were."""
        return self.abort_where(lambda known: _belongs(known, rid))

    def abort_where(self, chosen: Callable[[str], bool]) -> int:
        """End the requests whose ids are chosen; how many there were."""
        return self.calls.call(lambda: self._loop.abort_requests(chosen))

    def abort_all(self) -> int:
        return self.calls.call(lambda: self._loop.abort_requests(lambda _: True))

    def load_numbers(self) -> LoadNumbers:
        return self.calls.call(self._loop.load)

    def loads(self) -> dict[int, LoadNumbers]:
        """By the numbers of the replicas that can be reached from here."""
        return {self._loop.log.data_rank: self.load_numbers()}

    def close(self) -> None:
        """Every later call fails. What it holds goes with the last reference to it: no cycle is left."""
        self.calls.close()
        self.updates.on_awake = nothing

    def start_profile(self, fields: Mapping[str, Any]) -> str:
        """Every rank records from now on; what is written where. Raises OperationError."""
        try:
            profile_options(fields, torch.cuda.is_available())
        except ProfileRefused as error:
            raise OperationError(400, str(error)) from None
        return self._controlled("start_profile", [dict(fields)])

    def stop_profile(self) -> str:
        """Every rank writes its trace; where. Raises OperationError."""
        return self._controlled("stop_profile", [])

    def _controlled(self, method: str, args: list[Any]) -> str:
        success, message = self.calls.call(lambda: self._loop.control(method, args))
        if not success:
            raise OperationError(400 if "output_dir" in message else 409, message)
        return message


def _belongs(known: str, rid: str) -> bool:
    head, dash, tail = known.rpartition("-")
    return known == rid or (dash == "-" and head == rid and tail.isdigit())


def text(body: Mapping[str, Any], field: str, default: str | None) -> str:
    """A field of a request body. Raises OperationError naming it."""
    value = body.get(field, default)
    if not isinstance(value, str) or not value:
        raise OperationError(400, f"{field} must be a non-empty string")
    return value
