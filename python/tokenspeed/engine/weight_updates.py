# SPDX-License-Identifier: MIT
"""New weights for a running engine: a checkpoint, tensors that are sent, or the old ones under another name.

Called on an endpoint's thread, one update at a time. New weights are loaded beside the running engine and take the
place of the old ones with no step in flight, or nothing changes (`OperationError`). Their number separates the prefix
cache; their name changes only once they serve. Weights that sleep wake up as what they are updated to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from tokenspeed.config.model import ModelConfig, load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import resolve_model, weight_files
from tokenspeed.engine.errors import RETRY, OperationError
from tokenspeed.engine.loop import EngineLoop, nothing
from tokenspeed.engine.loop_calls import LoopCalls
from tokenspeed.engine.new_weights import NewWeights, WeightsFrom
from tokenspeed.engine.occupation import WEIGHTS, RankMemory
from tokenspeed.engine.trainer_groups import TrainerGroups
from tokenspeed.models import NamedTensors
from tokenspeed.models.model import Model
from tokenspeed.parallel.trainer import TensorFacts, TrainerGroup

_RUNNING = "requests are running, so the cache cannot be flushed; the weights are as they were"


@dataclass(frozen=True)
class Asked:
    """What comes with new weights. version: their name, None to keep the one that there is. flush: empty the prefix
    cache with the change, or refuse it while a request holds blocks. Blocks of other weights are never hit anyway.
    abort: end the requests that run or wait, in the moment of the change."""

    version: str | None
    flush: bool
    abort: bool

    def after(self, later: Asked) -> Asked:
        """This and what came later, in one."""
        version = self.version if later.version is None else later.version
        return Asked(version, self.flush or later.flush, self.abort or later.abort)


@dataclass(frozen=True)
class Serving:
    """Where an engine's weights come from, and what they must be like."""

    weights: WeightsFrom
    model_config: ModelConfig
    weight_version: str


@dataclass(frozen=True)
class Sources:
    """Who loads new weights on every rank, and the trainers that send some."""

    new_weights: NewWeights
    groups: TrainerGroups


class WeightUpdates:
    """first: what runs now. sources: what can take its place. memory: where it lies."""

    def __init__(
        self, loop: EngineLoop, calls: LoopCalls, first: Serving, sources: Sources, memory: RankMemory
    ) -> None:
        loop.weight_name = first.weight_version
        self.weights = first.weights
        self.on_awake: Callable[[], None] = nothing
        """Called after weights that slept were updated; set before the first update only."""
        self._files = weight_files(first.weights.source)
        self._model_config = first.model_config
        self._collected: _Collected | None = None
        self._loop = loop
        self._calls = calls
        self._new_weights = sources.new_weights
        self._groups = sources.groups
        self._memory = memory
        self._num_versions = 0
        self._updating = threading.Lock()

    def exclusive(self) -> Exclusive:
        """Nobody else changes weights, or where they lie, meanwhile. Raises OperationError where somebody does."""
        return Exclusive(self._updating)

    def rename(self, version: str) -> None:
        """The same weights under another name; prefixes are not shared across the change."""
        with self.exclusive():
            self._rename(version)

    def from_disk(self, model_path: str, load_format: str, asked: Asked) -> None:
        """Serve the checkpoint at `model_path`: all of it or, with OperationError, none. Requests that run through the
        change go on with the new weights over the KV that they have, unless they are asked not to be there."""
        with self.exclusive():
            try:
                source = resolve_model(model_path)
                self._check_shape(load_model_config(source, self._model_config.overrides))
            except ModelError as error:
                raise OperationError(400, str(error)) from None
            self._take(WeightsFrom(source, load_format), asked)
            self._forget()

    def from_tensors(self, tensors: NamedTensors, asked: Asked) -> None:
        """Serve these tensors in place of those of their names, as `from_disk` serves a checkpoint; what is not named
        stays, as it was read or sent before."""
        with self.exclusive():
            self._take_sent(self._new_weights.sent.add(tensors), asked)

    def join_group(self, group: TrainerGroup) -> None:
        """Meet a trainer, on every rank. Raises OperationError."""
        with self.exclusive():
            self._groups.join(group, self._calls.call)

    def leave_group(self, name: str) -> None:
        """Raises OperationError: there is none of this name."""
        with self.exclusive():
            self._groups.leave(name, self._calls.call)

    def from_group(self, name: str, facts: Sequence[TensorFacts], asked: Asked, flattened: bool) -> None:
        """Serve what the trainer broadcasts now, in this order, as `from_tensors` does; flattened: all at once. It is
        received before anything is said about it, so that the trainer is not left waiting. Raises OperationError."""
        with self.exclusive():
            keys = self._groups.receive(name, facts, flattened, self._calls.call)
            self._take_sent({fact.name: key for fact, key in zip(facts, keys)}, asked)

    @property
    def device(self) -> torch.device:
        return self._groups.device

    def close(self) -> None:
        self._groups.close()

    def start(self) -> None:
        """From here on updates are only collected; `finish` serves them all at once. One that was started and never
        finished is dropped, and begins anew."""
        with self.exclusive():
            self._collected = _Collected(self.weights, Asked(None, False, False))
            self._forget()

    def finish(self, version: str | None) -> None:
        """Serve what was collected under `version`, else under the last name that came with a part of it. Raises
        OperationError: none was started; requests run that a part asked not to be there, and it can be finished later;
        or what was collected cannot be served, and all of it is dropped then."""
        with self.exclusive():
            collected = self._collected
            if collected is None:
                raise OperationError(409, "no weight update was started; POST /start_weight_update first")
            asked = collected.asked.after(Asked(version, False, False))
            try:
                if collected.weights is not self.weights:
                    self._serve(collected.weights, asked)
                elif asked.version is not None:
                    self._rename(asked.version)
            except OperationError as error:
                if error.status == RETRY:
                    raise
                self._collected = None
                self._forget()
                raise
            self._collected = None
            self._forget()

    @property
    def collects(self) -> bool:
        """Whether an update was started and not finished."""
        return self._collected is not None

    def read_again(self) -> None:
        """Wake weights that sleep, as they were: from the files, and from what was sent. Within `exclusive`.

        Raises OperationError, and they sleep on.
        """
        if weight_files(self.weights.source) != self._files:
            raise OperationError(
                409,
                f"weights: the files of {self.weights.source.path} have changed since they were read; "
                "POST /update_weights_from_disk serves what is there now",
            )
        model = self._loaded(self.weights)
        self._calls.call(lambda: self._new_weights.put(model))

    def _take_sent(self, keys: Mapping[str, int], asked: Asked) -> None:
        base = self.weights if self._collected is None else self._collected.weights
        try:
            self._take(replace(base, sent={**base.sent, **keys}), asked)
        finally:
            self._forget()

    def _forget(self) -> None:
        """What no longer serves and is not collected."""
        kept = [self.weights, *([] if self._collected is None else [self._collected.weights])]
        keys = {key for weights in kept for key in weights.sent.values()}
        if keys != self._new_weights.sent.keys():
            self._calls.call(lambda: self._new_weights.keep_only(keys))

    def _take(self, weights: WeightsFrom, asked: Asked) -> None:
        if self._collected is None:
            self._serve(weights, asked)
        else:
            self._collected = _Collected(weights, self._collected.asked.after(asked))

    def _serve(self, weights: WeightsFrom, asked: Asked) -> None:
        if asked.flush and not asked.abort and self._calls.call(self._loop.load).active_blocks:
            raise OperationError(RETRY, _RUNNING)  # before minutes of loading
        files, sleeps = weight_files(weights.source), WEIGHTS in self._memory.asleep
        model = self._loaded(weights)
        try:
            self._calls.call(lambda: self._swap(model, asked))
        except OperationError:
            if sleeps:
                self._calls.call(lambda: self._memory.release(WEIGHTS, self._memory.keeps))
            raise
        self.weights, self._files = weights, files
        if sleeps:
            self.on_awake()

    def _loaded(self, weights: WeightsFrom) -> Model:
        """On every rank, and with memory to be put into."""
        try:
            model = self._new_weights.load(weights, self._calls.call)
        except ModelError as error:
            raise OperationError(400, str(error)) from None
        try:
            self._memory.resume(WEIGHTS, self._calls.call)
        except OperationError:
            self._calls.call(self._new_weights.drop)
            raise
        return model

    def _swap(self, model: Model, asked: Asked) -> None:
        self._loop.come_to_rest()
        if asked.abort:
            self._loop.abort_requests(lambda _: True)
        if asked.flush and not self._loop.flush_cache():
            self._new_weights.drop()
            raise OperationError(RETRY, _RUNNING)
        try:
            self._new_weights.put(model)
        except ModelError as error:
            self._new_weights.drop()
            raise OperationError(400, str(error)) from None
        self._next_version(asked.version)

    def _rename(self, version: str) -> None:
        if version != self._loop.weight_name:
            self._calls.call(lambda: self._next_version(version))

    def _next_version(self, version: str | None) -> None:
        """On the loop's thread, so that no step between the two goes by a wrong name."""
        self._num_versions += 1
        self._loop.set_weight_version(self._num_versions)
        if version is not None:
            self._loop.name_weights(version)

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


@dataclass(frozen=True)
class _Collected:
    """What an update between start and finish comes to so far."""

    weights: WeightsFrom
    asked: Asked


class Exclusive:
    """One at a time; a second one is refused rather than queued."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise OperationError(RETRY, "another weight update, or a change of what sleeps, is under way")

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()
