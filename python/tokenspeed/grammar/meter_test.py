# SPDX-License-Identifier: MIT
"""What grammars cost, by a clock that matching moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenspeed.grammar import Matcher, Meter
from tokenspeed.grammar.meter import LIMIT_A_TOKEN_S, LIMIT_S


class Slow:
    """A grammar whose calls take `cost_s` each."""

    num_bytes = 7
    is_terminated = False

    def __init__(self, cost_s: float) -> None:
        self.cost_s = cost_s
        self.now_s = 0.0

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher:
        return self

    def accept(self, token_id: int) -> bool:
        self.now_s += self.cost_s
        return True

    def fill(self, row: NDArray[np.int32]) -> None:
        self.now_s += self.cost_s


def costly_after(cost_s: float, num_tokens: int) -> int | None:
    """Tokens until request 5 is too costly."""
    grammar = Slow(cost_s)
    meter = Meter(lambda: grammar.now_s)
    matcher = meter.of(5, grammar).matcher(())
    for token in range(num_tokens):
        matcher.fill(np.zeros(1, np.int32))
        assert matcher.accept(token)
        costly = meter.take()
        if costly:
            assert costly == [5]
            matcher.fill(np.zeros(1, np.int32))
            assert meter.take() == [], "it is told once"
            return token + 1
    return None


def test_an_output_is_too_costly_when_its_tokens_take_long_and_it_has_taken_seconds() -> None:
    assert costly_after(2 * LIMIT_S, 3) == 1
    assert costly_after(LIMIT_S / 10, 100) == 6
    assert costly_after(LIMIT_A_TOKEN_S / 2.1, 10_000) is None


def test_a_metered_grammar_is_its_grammar() -> None:
    grammar = Slow(0.0)
    metered = Meter().of(1, grammar)
    assert metered.num_bytes == 7 and not metered.matcher(()).is_terminated
