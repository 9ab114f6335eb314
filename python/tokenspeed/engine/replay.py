# SPDX-License-Identifier: MIT
"""Decode steps of a CPU that are played back: the model's kernels without the Python between them.

The first step of a number of rows is run as ever and recorded meanwhile, the second is played and run, and if both give
the same bits the later ones are only played, over inputs that are copied to where the recorded kernels read them. Only
the model is recorded: inputs are made and tokens drawn as in any other step, whatever requests ask for. A model that
computes outside of our kernels is not played. Used by the runner's thread alone.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
import torch.autograd.profiler

from tokenspeed.engine.device_state import DeviceState
from tokenspeed.engine.kv_pool import KVCaches
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.models.model import Hidden
from tokenspeed_kernel import api

logger = logging.getLogger("tokenspeed.engine")


class DecodeModel(Protocol):
    def hidden(self, batch: ForwardBatch) -> Hidden: ...

    def logits(self, hidden: Hidden, batch: ForwardBatch) -> torch.Tensor: ...


class DecodeRecordings:
    """sizes: numbers of rows of steps that are recorded."""

    def __init__(self, sizes: tuple[int, ...], state: DeviceState) -> None:
        self._sizes = frozenset(sizes)
        self._max_kv_len = state.num_columns * state.block_size
        largest = max(sizes)
        self._inputs = torch.zeros((3, largest), dtype=torch.int64)
        self._rows = torch.arange(largest)
        self._kv_lens = torch.zeros(largest, dtype=torch.int32)
        self._tables = torch.zeros((largest, state.num_columns), dtype=torch.int32)
        self._query_start = torch.arange(largest + 1, dtype=torch.int32)
        self.forget()

    def forget(self) -> None:
        """The model changes: nothing that was recorded holds any more. No step may be in flight."""
        self.played: set[int] = set()
        """Sizes whose steps are played from now on."""
        self.refused: str | None = None
        """Why no step is played."""
        self._workspace = api.Workspace()
        self._recorded: dict[int, api.Recorded] = {}
        self._batches: dict[int, ForwardBatch] = {}

    def fit(self, batch: ForwardBatch) -> bool:
        """Whether `logits` may run the step: one token a row, all of them sampled, and nobody who watches torch."""
        rows, meta = len(batch.positions), batch.attention
        return (
            rows in self._sizes
            and meta.num_decode_rows == rows == len(meta.kv_lens) == len(batch.sample_indices)
            and self.refused is None
            and not torch.autograd.profiler._is_profiler_enabled
        )

    def logits(self, model: DecodeModel, batch: ForwardBatch) -> torch.Tensor:
        """float32 [R, vocabulary], valid until the next step."""
        rows = len(batch.positions)
        mine = self._filled(batch, rows)
        recorded = self._recorded.get(rows)
        if recorded is None:
            return self._record(model, mine, rows)
        logits = recorded.play()
        return logits if rows in self.played else self._compared(logits, model, mine, rows)

    def _record(self, model: DecodeModel, batch: ForwardBatch, rows: int) -> torch.Tensor:
        logits, outcome = api.record(lambda: model.logits(model.hidden(batch), batch), self._workspace)
        if isinstance(outcome, str):
            self._refuse(f"{outcome} is none of our kernels")
        else:
            self._recorded[rows] = outcome
        return logits

    def _compared(self, played: torch.Tensor, model: DecodeModel, batch: ForwardBatch, rows: int) -> torch.Tensor:
        """The step once more, as ever: what a model computes unseen by torch is missing from what was played."""
        logits = model.logits(model.hidden(batch), batch)
        if torch.equal(logits.view(torch.int32), played.view(torch.int32)):
            self.played.add(rows)
        else:
            self._refuse("a part of the model was not seen")
        return logits

    def _refuse(self, reason: str) -> None:
        self.forget()
        self.refused = reason
        logger.info("decode steps are not played back: %s", reason)

    def _filled(self, batch: ForwardBatch, rows: int) -> ForwardBatch:
        """The step's numbers, where a recording of so many rows reads them."""
        mine = self._batches.get(rows)
        if mine is None:
            mine = self._batches[rows] = self._batch_of(rows, batch.kv_caches)
        mine.token_ids.copy_(batch.token_ids)
        mine.positions.copy_(batch.positions)
        mine.slot_mapping.copy_(batch.slot_mapping)
        mine.attention.kv_lens.copy_(batch.attention.kv_lens)
        tables = batch.attention.block_tables
        mine.attention.block_tables[:, : tables.shape[1]].copy_(tables)
        return mine

    def _batch_of(self, rows: int, caches: KVCaches) -> ForwardBatch:
        attention = api.AttentionMetadata(
            block_tables=self._tables[:rows],
            query_start=self._query_start[: rows + 1],
            kv_lens=self._kv_lens[:rows],
            max_query_len=1,
            max_kv_len=self._max_kv_len,
            num_decode_rows=rows,
        )
        token_ids, positions, slot_mapping = self._inputs[:, :rows].unbind(0)
        return ForwardBatch(token_ids, positions, slot_mapping, self._rows[:rows], attention, caches)
