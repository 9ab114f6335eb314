# SPDX-License-Identifier: MIT
"""What each output's grammar costs, so that one whose parser goes exponential ends alone and holds no others up.

Ambiguous grammars (`root ::= root root | "a"`, nested counts) can take seconds a token in any library, and no look at
the grammar tells. Counted is processor time of the thread that matches. Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tokenspeed.grammar.backend import CompiledGrammar, Matcher

LIMIT_S = 2.0
LIMIT_A_TOKEN_S = 0.02
"""An output is too costly when it took 20 ms a token and 2 s more."""


class Meter:
    """clock: processor time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        self._costly: list[int] = []

    def of(self, request_id: int, grammar: CompiledGrammar) -> CompiledGrammar:
        """The same grammar, its time counted to the request."""
        return _Metered(self, request_id, grammar)

    def exceeded(self, request_id: int) -> None:
        self._costly.append(request_id)

    def take(self) -> list[int]:
        """Requests that have become too costly since the last call."""
        if not self._costly:
            return self._costly
        costly, self._costly = self._costly, []
        return costly


class _Metered:
    def __init__(self, meter: Meter, request_id: int, grammar: CompiledGrammar) -> None:
        self._meter = meter
        self._request_id = request_id
        self._grammar = grammar
        self.num_bytes = grammar.num_bytes

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher:
        return _MeteredMatcher(self._meter, self._request_id, self._grammar.matcher(stop_token_ids))


class _MeteredMatcher:
    def __init__(self, meter: Meter, request_id: int, matcher: Matcher) -> None:
        self._meter = meter
        self._request_id = request_id
        self._matcher = matcher
        self._spent_s = 0.0
        self._num_tokens = 0
        self._is_costly = False

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated

    def accept(self, token_id: int) -> bool:
        begun_s = self._meter.clock()
        accepted = self._matcher.accept(token_id)
        self._num_tokens += 1
        self._count(begun_s)
        return accepted

    def fill(self, row: NDArray[np.int32]) -> None:
        begun_s = self._meter.clock()
        self._matcher.fill(row)
        self._count(begun_s)

    def _count(self, begun_s: float) -> None:
        self._spent_s += self._meter.clock() - begun_s
        if self._spent_s > LIMIT_S + LIMIT_A_TOKEN_S * self._num_tokens and not self._is_costly:
            self._is_costly = True
            self._meter.exceeded(self._request_id)
