# SPDX-License-Identifier: MIT
"""A transfer counts once it is over on every rank, and as failed when it failed on any."""

from __future__ import annotations

import pytest

from tokenspeed.engine.arrivals import QUIET, Arrivals, News, Told
from tokenspeed.kvstore import Moved


def test_a_transfer_is_over_when_every_rank_has_said_so() -> None:
    arrivals = Arrivals(3, lambda: None)
    arrivals.add(Moved(7, True))
    arrivals.add_of(2, Moved(8, True))
    arrivals.add_of(2, Moved(7, True))
    assert arrivals.take().moved == []
    arrivals.add_of(1, Moved(7, True))
    assert arrivals.take().moved == [Moved(7, True)]
    assert arrivals.take().moved == []


def test_one_rank_that_failed_has_failed_it_for_all() -> None:
    arrivals = Arrivals(2, lambda: None)
    for transfer, ok in ((1, False), (2, True)):
        arrivals.add_of(1, Moved(transfer, ok))
        arrivals.add(Moved(transfer, True))
    assert arrivals.take().moved == [Moved(1, False), Moved(2, True)]


def test_who_waits_for_a_lost_rank_hears_of_the_loss() -> None:
    def check() -> None:
        raise ConnectionError("rank 1 ended")

    with pytest.raises(ConnectionError, match="rank 1 ended"):
        Arrivals(2, check).wait()


def test_another_rank_reports_its_own_and_takes_what_it_was_handed() -> None:
    reported: list[Moved] = []
    told = Told(reported.append)
    told.add(Moved(3, True))
    assert reported == [Moved(3, True)] and not told.take().is_due
    told.hand_over(News([Moved(3, False)], 17))
    assert told.take() == News([Moved(3, False)], 17, is_told=True)
    told.hand_over(QUIET)
    assert told.take().is_due, "a turn that was told is taken, whatever it brings"
    assert not told.take().is_due


def test_of_what_the_ranks_have_a_block_counts_that_is_on_all() -> None:
    arrivals = Arrivals(2, lambda: None)
    arrivals.clock = lambda: 42
    arrivals.add(Moved(1, True, (True, True, False)))
    arrivals.add_of(1, Moved(1, True, (True, False, False)))
    arrivals.add(Moved(2, True, (True,)))
    arrivals.add_of(1, Moved(2, False))
    assert arrivals.take() == News([Moved(1, True, (True, False, False)), Moved(2, False)], 42)
