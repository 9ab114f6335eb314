# SPDX-License-Identifier: MIT
"""New weights on every rank, or on none: each loads its part beside the running engine, then all take it between the
same two turns.

The first rank's `load` is called on an endpoint's thread and waits for all; its `put` on the loop's. Other ranks do
what they are told: they load on a thread of their own and report, and put when the first one has put.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.engine.loop import EngineLoop
from tokenspeed.engine.ranks import Ranks
from tokenspeed.models import NamedTensors
from tokenspeed.models.model import Model


@dataclass(frozen=True)
class WeightsFrom:
    """A checkpoint, and tensors by its names that take the place of its own: keys of `SentTensors`."""

    source: ModelSource
    load_format: str
    sent: Mapping[str, int] = field(default_factory=dict)


class SentTensors(dict[int, torch.Tensor]):
    """What trainers sent, in the host's memory, by keys that are the same on every rank.

    everywhere: on the first rank, the keys that the others have too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.everywhere: set[int] = set()
        self._next = 0

    def reserve(self, count: int) -> int:
        """Room for so many keys; the first of them."""
        self._next += count
        return self._next - count

    def add(self, tensors: NamedTensors) -> dict[str, int]:
        """Keep these on the first rank; their keys by name."""
        first = self.reserve(len(tensors))
        keys = {name: first + index for index, name in enumerate(tensors)}
        self.update({keys[name]: tensor for name, tensor in tensors.items()})
        return keys

    def of(self, weights: WeightsFrom) -> NamedTensors:
        return {name: self[key] for name, key in weights.sent.items()}

    def keep_only(self, keys: Collection[int]) -> None:
        for key in self.keys() - set(keys):
            del self[key]
        self.everywhere &= set(keys)


Load = Callable[[WeightsFrom], Model]
Put = Callable[[Model], None]
OnLoop = Callable[[Callable[[], Any]], Any]

_WHAT = "new weights"


class NewWeights:
    """load, put: of this rank's part; both raise ModelError with nothing changed."""

    def __init__(self, loop: EngineLoop, ranks: Ranks, load: Load, put: Put, sent: SentTensors) -> None:
        self.sent = sent
        self._loop = loop
        self._ranks = ranks
        self._load = load
        self._put = put
        self._prepared: Model | None = None
        self._thread: threading.Thread | None = None
        if not ranks.leads:
            ranks.does("prepare_weights", self._prepare)
            ranks.does("take_weights", self._take)
            ranks.does("drop_weights", self._drop)
            ranks.does("keep_sent", sent.keep_only)

    def load(self, weights: WeightsFrom, on_loop: OnLoop) -> Model:
        """The first rank's part, once every rank has its own. on_loop: calls something between two turns.

        Raises ModelError, and then nobody has anything.
        """
        mirror = self._loop.mirror
        fresh = {key: self.sent[key] for key in weights.sent.values() if key not in self.sent.everywhere}
        on_loop(lambda: mirror.operated("prepare_weights", weights, fresh))
        self.sent.everywhere |= fresh.keys()
        model, failure = None, None
        try:
            model = self._load(weights)
        except ModelError as error:
            failure = str(error)
        failures = [text for text in self._ranks.gather(_WHAT, failure) if text is not None]
        if failures or model is None:
            on_loop(lambda: mirror.operated("drop_weights"))
            raise ModelError(failures[0])
        return model

    def put(self, model: Model) -> None:
        """Take the new weights, on every rank. Nothing may be in flight."""
        self._put(model)
        self._loop.mirror.operated("take_weights")

    def drop(self) -> None:
        """Keep the old weights, on every rank, though the new ones were loaded."""
        self._loop.mirror.operated("drop_weights")

    def keep_only(self, keys: Collection[int]) -> None:
        """Forget all other tensors that were sent, on every rank."""
        self._loop.mirror.operated("keep_sent", keys)
        self.sent.keep_only(keys)

    # ---- other ranks -----------------------------------------------------------------------------------------------

    def _prepare(self, weights: WeightsFrom, fresh: Mapping[int, torch.Tensor]) -> None:
        self.sent.update(fresh)

        def run() -> None:
            failure = None
            try:
                self._prepared = self._load(weights)
            except ModelError as error:
                failure = str(error)
            self._ranks.gather(_WHAT, failure)

        self._thread = threading.Thread(target=run, name="new-weights", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        assert self._thread is not None
        self._thread.join()
        assert self._prepared is not None
        self._put(self._prepared)
        self._drop()

    def _drop(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._prepared = self._thread = None
