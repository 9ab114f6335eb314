# SPDX-License-Identifier: MIT
"""Log-probabilities of a prompt's own tokens: which are due in a step, and what has come of them so far.

One `PromptScores` a request that asks, owned by the loop's thread. A prompt is computed in chunks, and again after a
retraction; every token is scored once, by the logits of the token before it, the first time its chunk is planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenspeed.engine.messages import PromptLogprobs


@dataclass(frozen=True, slots=True)
class PromptRow:
    """What a step has to score for one row of its plan.

    offset: place in the row's query of the first token whose logits are read. targets: int64 [n], the tokens that came
    after it and its successors. top_n: alternatives to report. chosen: tokens to report behind them.
    """

    request_id: int
    row: int
    offset: int
    targets: NDArray[np.int64]
    top_n: int
    chosen: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Scores of one `PromptRow`, on the host: float32 [n], float32 [n, k], int32 [n, k], where k counts
    alternatives and chosen tokens."""

    request_id: int
    values: NDArray[np.float32]
    top_values: NDArray[np.float32]
    top_ids: NDArray[np.int32]


class PromptScores:
    """prompt_ids: int32 [P]. start: the first position asked for; position 0 has no score. top_n, chosen: as a row
    has them."""

    def __init__(self, prompt_ids: NDArray[np.int32], start: int, top_n: int, chosen: tuple[int, ...]) -> None:
        self._prompt_ids = prompt_ids
        self._start = min(start, len(prompt_ids))
        self._top_n = top_n
        self._chosen = chosen
        self._next = max(1, self._start)
        self._pieces: list[PromptPiece] = []
        self._num_scored = 0
        self._told = False

    def due(self, request_id: int, row: int, context_len: int, query_len: int) -> PromptRow | None:
        """What a row that computes positions [context_len, context_len + query_len) can score; planned now."""
        end = min(context_len + query_len + 1, len(self._prompt_ids))
        if self._next >= end:
            return None
        first, self._next = self._next, end
        targets = self._prompt_ids[first:end].astype(np.int64)
        return PromptRow(request_id, row, first - 1 - context_len, targets, self._top_n, self._chosen)

    def take(self, piece: PromptPiece) -> None:
        """Pieces come in order."""
        self._pieces.append(piece)
        self._num_scored += len(piece.values)

    def tell(self) -> PromptLogprobs | None:
        """All of them, once, when the last has come."""
        if self._told or self._num_scored < len(self._prompt_ids) - max(1, self._start):
            return None
        self._told = True
        head: list[None] = [None] if self._start == 0 else []
        values = [value for piece in self._pieces for value in piece.values.tolist()]
        top_values = [row for piece in self._pieces for row in piece.top_values.tolist()]
        top_ids = [row for piece in self._pieces for row in piece.top_ids.tolist()]
        blank: list[list[float]] = [[] for _ in head]
        return PromptLogprobs(
            self._start,
            self._prompt_ids[self._start :].tolist(),
            [*head, *values],
            [*blank, *top_values],
            [*([[]] * len(head)), *top_ids],
        )
