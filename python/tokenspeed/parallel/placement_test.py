# SPDX-License-Identifier: MIT
"""The placement compiler puts the right collective between stages, and none where none is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed.parallel import Group, Placement, PlacementError, add, connect

REPLICATED, SHARDED, PARTIAL = Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL


class AddOne:
    def __init__(self, takes: Placement, gives: Placement) -> None:
        self.takes, self.gives = takes, gives

    def __call__(self, x: torch.Tensor, _batch: Any, /) -> torch.Tensor:
        return x + 1


class TracingGroup(Group):
    """A group of two whose collectives multiply by a number of their own, so that a result tells what ran."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 10

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x * 100

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1000


def run(group: Group, *stages: AddOne) -> float:
    return float(connect(group, *stages)(torch.zeros(1), None))


def test_one_rank_runs_the_bare_stages() -> None:
    chain = connect(Group(), AddOne(REPLICATED, SHARDED), AddOne(SHARDED, PARTIAL))
    assert len(chain) == 2
    assert float(chain(torch.zeros(1), None)) == 2


class AddsItself(AddOne):
    def adds(self, rows: torch.Tensor) -> bool:
        return len(rows) > 1

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return total.add_(x + 1)


def test_a_chain_adds_where_its_last_stage_does_and_no_collective_follows() -> None:
    stages = (AddOne(REPLICATED, SHARDED), AddsItself(SHARDED, PARTIAL))
    chain = connect(Group(), *stages)
    assert (chain.adds(torch.zeros(1)), chain.adds(torch.zeros(2))) == (False, True)
    total = torch.full((2,), 5.0)
    assert chain.add_to(total, torch.zeros(2), None) is total
    assert total.tolist() == [7, 7]
    assert not connect(TracingGroup(0, 2), *stages).adds(torch.zeros(2))
    assert not connect(Group(), *stages[::-1]).adds(torch.zeros(2))


def test_column_then_row_needs_one_all_reduce_at_the_end() -> None:
    assert run(TracingGroup(0, 2), AddOne(REPLICATED, SHARDED), AddOne(SHARDED, PARTIAL)) == 20


def test_sharded_output_is_gathered_and_replicated_input_is_cut() -> None:
    assert run(TracingGroup(0, 2), AddOne(REPLICATED, SHARDED)) == 100
    assert run(TracingGroup(0, 2), AddOne(SHARDED, PARTIAL)) == 10
    assert run(TracingGroup(0, 2), AddOne(REPLICATED, REPLICATED), AddOne(SHARDED, PARTIAL)) == 10010


def test_partial_output_is_summed_before_a_stage_that_takes_all() -> None:
    assert run(TracingGroup(0, 2), AddOne(REPLICATED, PARTIAL), AddOne(REPLICATED, REPLICATED)) == 11


def test_branches_are_added_before_the_one_collective_that_serves_both() -> None:
    group = TracingGroup(0, 2)
    routed = [AddOne(REPLICATED, PARTIAL)]
    shared = [AddOne(REPLICATED, SHARDED), AddOne(SHARDED, PARTIAL)]
    both = add(group, routed, shared)
    assert (both.takes, both.gives) == (REPLICATED, PARTIAL)
    assert float(connect(group, both)(torch.zeros(1), None)) == (1 + 2) * 10
    assert float(add(Group(), routed, shared)(torch.zeros(1), None)) == 3


def test_branches_that_lie_differently_or_sharded_are_an_error() -> None:
    group = TracingGroup(0, 2)
    with pytest.raises(PlacementError, match="give partial and replicated cannot be added"):
        add(group, [AddOne(REPLICATED, PARTIAL)], [AddOne(REPLICATED, REPLICATED)])
    with pytest.raises(PlacementError, match="must give replicated or partial"):
        add(group, [AddOne(REPLICATED, SHARDED)], [AddOne(REPLICATED, SHARDED)])


def test_neighbours_that_nothing_connects_are_an_error() -> None:
    with pytest.raises(PlacementError, match="no collective turns partial activations into sharded ones"):
        connect(TracingGroup(0, 2), AddOne(REPLICATED, PARTIAL), AddOne(SHARDED, PARTIAL))


def test_own_part_is_the_ranks_columns() -> None:
    x = torch.arange(8.0).view(2, 4)
    assert Group(1, 2).own_part(x).tolist() == [[2.0, 3.0], [6.0, 7.0]]
