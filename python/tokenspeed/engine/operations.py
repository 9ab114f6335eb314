# SPDX-License-Identifier: MIT
"""What operators and trainers do to a running engine: flush, pause, abort, name the weights, replace them.

Each method is called on an endpoint's thread and reaches the loop through `LoopCalls`, so everything that the loop
owns is touched between two turns. What cannot be done is an `OperationError` with an HTTP status, and nothing has
changed then. New weights are loaded beside the running engine and take the old ones' place with no step in flight;
their number separates the prefix cache, their name changes only once they serve.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tokenspeed.config.model import ModelConfig, load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import resolve_model
from tokenspeed.engine.loop import EngineLoop
from tokenspeed.engine.loop_calls import LoopCalls
from tokenspeed.engine.messages import LoadNumbers
from tokenspeed.engine.new_weights import NewWeights, WeightsFrom
from tokenspeed.engine.profiler import ProfileRefused, profile_options
from tokenspeed.models import NamedTensors
from tokenspeed.models.model import Model

PAUSE_MODES = ("abort", "wait", "keep")
RETRY = 409
"""The status of what can be done later, by the same call."""
_RUNNING = "requests are running, so the cache cannot be flushed; the weights are as they were"
_POLL_S = 0.02


class OperationError(Exception):
    """The operation was refused; nothing has changed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """What comes with new weights. version: their name, None to keep the one that there is. flush: empty the prefix
    cache with the change, or refuse it while a request holds blocks. Blocks of other weights are never hit anyway."""

    version: str | None
    flush: bool

    def after(self, later: Asked) -> Asked:
        """This and what came later, in one."""
        return Asked(self.version if later.version is None else later.version, self.flush or later.flush)


class Operations:
    """weights: what runs now. new_weights: what can take its place."""

    def __init__(
        self,
        loop: EngineLoop,
        weights: WeightsFrom,
        model_config: ModelConfig,
        weight_version: str,
        new_weights: NewWeights,
    ) -> None:
        self.calls = LoopCalls()
        loop.weight_name = weight_version
        self._weights = weights
        self._collected: _Collected | None = None
        self._loop = loop
        self._model_config = model_config
        self._new_weights = new_weights
        self._num_versions = 0
        self._updating = threading.Lock()

    @property
    def weight_version(self) -> str:
        return self._loop.weight_name

    @property
    def model_path(self) -> str:
        return str(self._weights.source.path)

    def flush_cache(self) -> None:
        """Raises OperationError while a request holds blocks."""
        if not self.calls.call(self._loop.flush_cache):
            raise OperationError(409, "requests are running; nothing was flushed")

    def pause(self, mode: str, timeout_s: float) -> None:
        """Returns once nothing runs any more. wait: running requests finish first, new ones queue. abort: all that are
        here end. keep: all stay where they are. Raises OperationError when it takes longer; it is paused then."""
        if mode not in PAUSE_MODES:
            raise OperationError(400, f"mode {mode!r} is not one of {', '.join(PAUSE_MODES)}")
        self.calls.call(lambda: self._loop.pause(mode))
        deadline_s = time.monotonic() + timeout_s
        while not self.calls.call(lambda: self._loop.is_at_rest(mode)):
            if time.monotonic() > deadline_s:
                raise OperationError(504, f"paused, and requests are still running after {timeout_s:g} s")
            time.sleep(_POLL_S)

    @property
    def is_paused(self) -> bool:
        return self._loop.is_paused

    def resume(self) -> None:
        self.calls.call(self._loop.resume)

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

    def set_weight_version(self, version: str) -> None:
        """The same weights under another name; prefixes are not shared across the change."""
        with self._update():
            self._rename(version)

    def update_from_disk(self, model_path: str, load_format: str, asked: Asked) -> None:
        """Serve the checkpoint at `model_path`: all of it or, with OperationError, none. Requests that run through the
        change go on with the new weights over the KV that they have, unless they are asked not to be there."""
        with self._update():
            try:
                source = resolve_model(model_path)
                self._check_shape(load_model_config(source, self._model_config.overrides))
            except ModelError as error:
                raise OperationError(400, str(error)) from None
            self._take(WeightsFrom(source, load_format), asked)

    def update_from_tensors(self, tensors: NamedTensors, asked: Asked) -> None:
        """Serve these tensors in place of those of their names, as `update_from_disk` serves a checkpoint; what is not
        named stays, as it was read or sent before."""
        with self._update():
            base = self._weights if self._collected is None else self._collected.weights
            self._take(replace(base, tensors={**base.tensors, **tensors}), asked)

    def start_update(self) -> None:
        """From here on updates are only collected; `finish_update` serves them all at once. One that was started and
        never finished is dropped, and begins anew."""
        with self._update():
            self._collected = _Collected(self._weights, Asked(None, False))

    def finish_update(self, version: str | None) -> None:
        """Serve what was collected under `version`, else under the last name that came with a part of it. Raises
        OperationError: none was started; requests run that a part asked not to be there, and it can be finished later;
        or what was collected cannot be served, and all of it is dropped then."""
        with self._update():
            collected = self._collected
            if collected is None:
                raise OperationError(409, "no weight update was started; POST /start_weight_update first")
            asked = collected.asked.after(Asked(version, False))
            try:
                if collected.weights is not self._weights:
                    self._serve(collected.weights, asked)
                elif asked.version is not None:
                    self._rename(asked.version)
            except OperationError as error:
                if error.status == RETRY:
                    raise
                self._collected = None
                raise
            self._collected = None

    @property
    def collects(self) -> bool:
        """Whether an update was started and not finished."""
        return self._collected is not None

    def _take(self, weights: WeightsFrom, asked: Asked) -> None:
        if self._collected is None:
            self._serve(weights, asked)
        else:
            self._collected = _Collected(weights, self._collected.asked.after(asked))

    def _serve(self, weights: WeightsFrom, asked: Asked) -> None:
        if asked.flush and self.load_numbers().active_blocks:
            raise OperationError(RETRY, _RUNNING)  # before minutes of loading
        try:
            model = self._new_weights.load(weights, self.calls.call)
            self.calls.call(lambda: self._swap(model, asked))
        except ModelError as error:
            raise OperationError(400, str(error)) from None
        self._weights = weights

    def _rename(self, version: str) -> None:
        if version != self.weight_version:
            self.calls.call(lambda: self._next_version(version))

    def _update(self) -> _Exclusive:
        return _Exclusive(self._updating)

    def _check_shape(self, found: ModelConfig) -> None:
        """The dtype that numbers are stored in may differ; nothing else."""
        for part in fields(found):
            theirs, ours = getattr(found, part.name), getattr(self._model_config, part.name)
            if theirs != ours and part.name != "dtype":
                raise OperationError(
                    400,
                    "the checkpoint is of another architecture, size or quantization than the engine's: its "
                    f"{part.name} is {theirs} and the engine's is {ours}",
                )

    def _swap(self, model: Model, asked: Asked) -> None:
        self._loop.come_to_rest()
        if asked.flush and not self._loop.flush_cache():
            self._new_weights.drop()
            raise OperationError(RETRY, _RUNNING)
        self._new_weights.put(model)
        self._next_version(asked.version)

    def _next_version(self, version: str | None) -> None:
        """On the loop's thread, so that no step between the two goes by a wrong name."""
        self._num_versions += 1
        self._loop.set_weight_version(self._num_versions)
        if version is not None:
            self._loop.name_weights(version)


@dataclass(frozen=True)
class _Collected:
    """What an update between start and finish comes to so far."""

    weights: WeightsFrom
    asked: Asked


class _Exclusive:
    """One update at a time; a second one is refused rather than queued."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise OperationError(409, "another weight update is under way")

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()


def _belongs(known: str, rid: str) -> bool:
    head, dash, tail = known.rpartition("-")
    return known == rid or (dash == "-" and head == rid and tail.isdigit())


def text(body: Mapping[str, Any], field: str, default: str | None) -> str:
    """A field of a request body. Raises OperationError naming it."""
    value = body.get(field, default)
    if not isinstance(value, str) or not value:
        raise OperationError(400, f"{field} must be a non-empty string")
    return value
