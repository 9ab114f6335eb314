# SPDX-License-Identifier: MIT
"""The placement compiler: layers say how their input and output lie on the ranks, `connect` adds the collectives.

A model page lists stages; where what one gives is not what the next takes, `connect` puts the collective that turns
one into the other, once, when the model is built. With one rank there is nothing to put, and the chain is the bare
stages. Nobody writes an all-reduce in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch

from tokenspeed.parallel.group import Group


class Placement(Enum):
    """How an activation [T, n] lies on the ranks of a group."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    SHARDED = "sharded"
    """Each rank holds its columns, in rank order."""
    PARTIAL = "partial"
    """Each rank holds a summand."""


class PlacementError(ValueError):
    """Two neighbouring stages that no collective connects: a mistake in a model page."""


Step = Callable[[torch.Tensor, Any], torch.Tensor]


class Stage(Protocol):
    """A layer that takes one activation and gives one. The second argument is the step's `ForwardBatch`."""

    takes: Placement
    gives: Placement

    def __call__(self, x: torch.Tensor, batch: Any, /) -> torch.Tensor: ...


class Adding(Protocol):
    """A stage that can add its result to a tensor while it computes it; see `layers.RowLinear`."""

    def adds(self, rows: torch.Tensor) -> bool: ...

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...


class Chain:
    """Stages with their collectives, itself a stage. adding: the last step, where that is a stage of this kind."""

    __slots__ = ("adding", "gives", "steps", "takes")

    def __init__(
        self, steps: tuple[Step, ...], takes: Placement, gives: Placement, adding: Adding | None = None
    ) -> None:
        self.steps = steps
        self.adding = adding
        self.takes = takes
        self.gives = gives

    def __call__(self, x: torch.Tensor, batch: Any, /) -> torch.Tensor:
        for step in self.steps:
            x = step(x, batch)
        return x

    def adds(self, rows: torch.Tensor) -> bool:
        """Whether a step of so many rows is faster with `add_to`."""
        return self.adding is not None and self.adding.adds(rows)

    def add_to(self, total: torch.Tensor, x: torch.Tensor, batch: Any) -> torch.Tensor:
        """total + self(x), in the place of `total`. Only where it `adds`."""
        assert self.adding is not None
        for step in self.steps[:-1]:
            x = step(x, batch)
        return self.adding.add_to(total, x)

    def __len__(self) -> int:
        """Stages and collectives."""
        return len(self.steps)


def connect(group: Group, *stages: Stage) -> Chain:
    """The stages in order, from a replicated activation to a replicated one. Raises PlacementError."""
    chain = _in_order(group, stages)
    collective = _collective(group, chain.gives, Placement.REPLICATED)
    adding: Any = None if collective or not hasattr(stages[-1], "add_to") else stages[-1]
    return Chain((*chain.steps, *collective), Placement.REPLICATED, Placement.REPLICATED, adding)


def add(group: Group, *branches: Sequence[Stage]) -> Chain:
    """The sum of what branches make of one replicated activation, as one stage: one collective serves them all.

    Every branch's last stage must leave its result in the same placement. Raises PlacementError.
    """
    chains = [_in_order(group, branch) for branch in branches]
    gives = chains[0].gives
    for chain in chains:
        if chain.gives is not gives:
            raise PlacementError(f"branches that give {gives.value} and {chain.gives.value} cannot be added")
    if gives is Placement.SHARDED:
        raise PlacementError("branches to add must give replicated or partial activations")

    def total(x: torch.Tensor, batch: Any) -> torch.Tensor:
        first, *others = (chain(x, batch) for chain in chains)
        for other in others:
            first = first + other
        return first

    return Chain((total,), Placement.REPLICATED, gives)


def _in_order(group: Group, stages: Sequence[Stage]) -> Chain:
    """From a replicated activation to whatever the last stage gives."""
    steps: list[Step] = []
    held = Placement.REPLICATED
    for stage in stages:
        steps += _collective(group, held, stage.takes)
        steps.append(stage.__call__)
        held = stage.gives
    return Chain(tuple(steps), Placement.REPLICATED, held)


def _collective(group: Group, held: Placement, wanted: Placement) -> list[Step]:
    """Nothing, or the one step that turns `held` into `wanted`."""
    if held is wanted or group.size == 1:
        return []
    if held is Placement.PARTIAL and wanted is Placement.REPLICATED:
        return [lambda x, _batch: group.all_reduce(x)]
    if held is Placement.SHARDED and wanted is Placement.REPLICATED:
        return [lambda x, _batch: group.all_gather(x)]
    if held is Placement.REPLICATED and wanted is Placement.SHARDED:
        return [lambda x, _batch: group.own_part(x)]
    raise PlacementError(f"no collective turns {held.value} activations into {wanted.value} ones")
