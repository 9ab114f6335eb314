# SPDX-License-Identifier: MIT
"""Process groups that all ranks of an engine share with trainers, and the tensors that come through them.

The first rank's calls come on an endpoint's thread, one at a time; the other ranks do the same on threads of their own
and report. Either all ranks have joined, or received everything, or the group is closed on all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from tokenspeed.engine.errors import OperationError
from tokenspeed.engine.loop import EngineLoop
from tokenspeed.engine.new_weights import OnLoop, SentTensors
from tokenspeed.engine.ranks import Ranks
from tokenspeed.parallel.trainer import TensorFacts, TrainerGroup, TrainerLink

_WHAT = "trainer group"


class TrainerGroups:
    """sent: where what is received goes. timeout_s: that a trainer, or a tensor, may keep us waiting."""

    def __init__(
        self, loop: EngineLoop, ranks: Ranks, sent: SentTensors, device: torch.device, timeout_s: float
    ) -> None:
        self.device = device
        self._loop = loop
        self._ranks = ranks
        self._sent = sent
        self._timeout_s = timeout_s
        self._links: dict[str, TrainerLink] = {}
        if not ranks.leads:
            ranks.does("join_trainer", lambda group: self._beside(lambda: self._join(group)))
            ranks.does("hear_trainer", lambda *facts: self._beside(lambda: self._receive(*facts)))
            ranks.does("leave_trainer", self._leave)

    @property
    def names(self) -> list[str]:
        return list(self._links)

    def join(self, group: TrainerGroup, on_loop: OnLoop) -> None:
        """Raises OperationError: the name is taken, the numbers do not fit, or not all came."""
        last = group.rank_offset + self._ranks.group.size - 1
        if group.name in self._links:
            raise OperationError(400, f"group_name: {group.name!r} is joined already; destroy it first")
        if last >= group.world_size:
            raise OperationError(
                400, f"world_size: {group.world_size} has no place for the engine's {group.rank_offset} to {last}"
            )
        on_loop(lambda: self._loop.mirror.operated("join_trainer", group))
        failure = self._together(lambda: self._join(group))
        if failure is not None:
            self._leave_all(group.name, on_loop)
            where = f"{group.host}:{group.port}"
            raise OperationError(503, f"group {group.name!r} at {where} was not joined: {failure}")

    def leave(self, name: str, on_loop: OnLoop) -> None:
        self._check(name)
        self._leave_all(name, on_loop)

    def receive(self, name: str, facts: Sequence[TensorFacts], flattened: bool, on_loop: OnLoop) -> list[int]:
        """What the trainer broadcasts now, one by one or flattened into one: its keys in `sent`, the same on every
        rank. Raises OperationError when the group fails; it is closed then."""
        self._check(name)
        first = self._sent.reserve(len(facts))
        on_loop(lambda: self._loop.mirror.operated("hear_trainer", name, facts, first, flattened))
        failure = self._together(lambda: self._receive(name, facts, first, flattened))
        if failure is not None:
            self._leave_all(name, on_loop)
            raise OperationError(
                503,
                f"group {name!r} failed and is closed; the weights are as they were ({failure}); "
                "join again: POST /init_weights_update_group",
            )
        keys = list(range(first, first + len(facts)))
        self._sent.everywhere |= set(keys)
        return keys

    def close(self) -> None:
        for name in self.names:
            self._leave(name)

    def _check(self, name: str) -> None:
        if name not in self._links:
            known = ", ".join(map(repr, self._links)) or "none"
            raise OperationError(400, f"group_name: there is no group {name!r} (joined: {known})")

    def _leave_all(self, name: str, on_loop: OnLoop) -> None:
        on_loop(lambda: self._loop.mirror.operated("leave_trainer", name))
        self._leave(name)

    def _together(self, work: Callable[[], None]) -> str | None:
        """This rank's part, once every rank has ended its own; the first failure."""
        failures = self._ranks.gather(_WHAT, _tried(work))
        return next((text for text in failures if text is not None), None)

    def _beside(self, work: Callable[[], None]) -> None:
        """On another rank than the first, whose loop goes on meanwhile."""
        report = lambda: self._ranks.gather(_WHAT, _tried(work))  # noqa: E731
        threading.Thread(target=report, name="trainer-group", daemon=True).start()

    def _join(self, group: TrainerGroup) -> None:
        rank = group.rank_offset + self._ranks.group.rank
        self._links[group.name] = TrainerLink(group, rank, self.device, self._timeout_s)

    def _receive(self, name: str, facts: Sequence[TensorFacts], first: int, flattened: bool) -> None:
        link = self._links[name]
        for key, tensor in enumerate(link.receive_at_once(facts) if flattened else link.receive(facts), first):
            self._sent[key] = tensor

    def _leave(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is not None:
            link.close()


def _tried(work: Callable[[], None]) -> str | None:
    try:
        work()
    except (RuntimeError, MemoryError, ValueError, KeyError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
