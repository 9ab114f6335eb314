# SPDX-License-Identifier: MIT
"""Log-probabilities of tokens that a request names, beside those of the likeliest ones.

Each is what `api.logprobs` says of that token, so it has the same bits as where the token is drawn or among the
likeliest, alone or in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed_kernel import api


def chosen_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32 [R, m]. logits: float32 [R, V]. ids: int64 [R, m]."""
    columns = [api.logprobs(logits, ids[:, column].contiguous(), 0)[0] for column in range(ids.shape[1])]
    return torch.stack(columns, 1) if columns else logits.new_empty(ids.shape)


class ChosenTokens:
    """What each slot's request names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids: dict[int, tuple[int, ...]] = {}

    def set(self, slot: int, ids: Sequence[int]) -> None:
        self._ids.pop(slot, None)
        if ids:
            self._ids[slot] = tuple(ids)

    def logprobs(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> torch.Tensor | None:
        """float32 [S, m] of the rows of these slots, where m is the most that one of them names; beyond what a row
        names there is nothing to be read. None where none names any."""
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._ids] if self._ids else []
        if not rows:
            return None
        named = [self._ids[int(slots[row])] for row in rows]
        width = max(map(len, named))
        padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in named], dtype=torch.int64)
        places = torch.tensor(rows, dtype=torch.int64).to(self._device)
        found = logits.new_zeros(len(slots), width)
        found[places] = chosen_logprobs(logits[places], padded.to(self._device))
        return found
