# SPDX-License-Identifier: MIT
"""Masks from the host, in time for the step that needs them and no earlier than they can be known.

The mask of a request's next token depends on its last one. `begin`, called before a forward is launched, starts a
helper thread on the rows of this step: it waits until the last step's tokens are on the host, tells them to the rules
and fills the masks, while the forward runs. `finish`, called between forward and sampling, waits for the helper and
sends the masks. So with steps in flight a constrained row costs a wait for the step before the one just launched,
which is done first anyway; batches without such rows pay nothing. Called by the thread that launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.sampling.rules import RequestRules, RowFailure, num_words


@dataclass(frozen=True, slots=True)
class Masked:
    """Of the G ruled rows of a step, on the device.

    rows: int64 [G], rows of the step's logits. mask: int32 [G, words]. ends: bool [S] over all rows, whether only
    a stop may come. processors: (row, output so far, rules that have a processor). ruled: (row, rules) of all G.
    """

    rows: torch.Tensor
    mask: torch.Tensor
    ends: torch.Tensor
    processors: list[tuple[int, list[int], RequestRules]]
    ruled: list[tuple[int, RequestRules]]

    def failures(self) -> list[tuple[int, RowFailure]]:
        """(row, why) of rows that cannot go on; known once processors have run."""
        return [(row, rules.failure) for row, rules in self.ruled if rules.failure is not None]


@dataclass(frozen=True, slots=True)
class _Told:
    """Tokens that the rules have not been told yet. event: None where they are on the host already."""

    rules: list[RequestRules | None]
    tokens: torch.Tensor
    event: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Filled:
    rows: NDArray[np.int64]
    mask: torch.Tensor
    ends: NDArray[np.bool_]
    processors: list[tuple[int, list[int], RequestRules]]
    ruled: list[tuple[int, RequestRules]]


class HostRules:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots: list[RequestRules | None] = [None] * num_slots
        self._num_ruled = 0
        self._words = num_words(vocab_size)
        self._device = device
        self._on_host = device.type == "cpu"
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="token-masks")
        self._untold: list[_Told] = []
        self._filling: Future[_Filled] | None = None

    def set(self, slot: int, rules: RequestRules | None, output_ids: Sequence[int]) -> None:
        """Give `slot` to a request; `output_ids` is what it has produced before a retraction."""
        before, self._slots[slot] = self._slots[slot], rules
        self._num_ruled += (rules is not None) - (before is not None)
        if rules is not None:
            for token_id in output_ids:
                rules.accept(int(token_id))

    def begin(self, slots: NDArray[np.int64]) -> None:
        """Start on the masks of a step whose rows sample for these slots."""
        self._filling = None
        if not self._num_ruled or not len(slots):
            return
        ruled = [(row, rules) for row, slot in enumerate(slots.tolist()) if (rules := self._slots[slot]) is not None]
        if ruled:
            untold, self._untold = self._untold, []
            self._filling = self._helper.submit(self._fill, untold, ruled, len(slots))

    def finish(self) -> Masked | None:
        """The step's masks on the device; None when no row has rules."""
        if self._filling is None:
            return None
        filled, self._filling = self._filling.result(), None
        sent = [torch.from_numpy(filled.rows), filled.mask, torch.from_numpy(filled.ends)]
        if not self._on_host:
            sent = [tensor.to(self._device, non_blocking=True) for tensor in sent]
        return Masked(sent[0], sent[1], sent[2], filled.processors, filled.ruled)

    def sampled(self, slots: NDArray[np.int64], tokens: torch.Tensor) -> None:
        """What the step drew: int32 [S] on the device."""
        if not self._num_ruled:
            return
        rules = [self._slots[slot] for slot in slots.tolist()]
        if not any(entry is not None for entry in rules):
            return
        if self._on_host:
            self._untold.append(_Told(rules, tokens, None))
            return
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._untold.append(_Told(rules, host, event))

    def _fill(self, untold: list[_Told], ruled: list[tuple[int, RequestRules]], num_rows: int) -> _Filled:
        for told in untold:
            if told.event is not None:
                told.event.synchronize()
            for entry, token in zip(told.rules, told.tokens.tolist()):
                if entry is not None:
                    entry.accept(token)
        mask = torch.empty((len(ruled), self._words), dtype=torch.int32, pin_memory=not self._on_host)
        ends = np.zeros(num_rows, np.bool_)
        for words, (row, rules) in zip(mask.numpy(), ruled):
            ends[row] = rules.fill(words)
        processors = [(row, list(rules.output_ids), rules) for row, rules in ruled if rules.processor is not None]
        return _Filled(np.array([row for row, _ in ruled], np.int64), mask, ends, processors, ruled)
