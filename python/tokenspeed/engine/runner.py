# SPDX-License-Identifier: MIT
"""One forward and one draw of tokens, on the device. The runner owns the KV tensors and the last token of every slot.

Called by one thread, in the order in which steps were planned; that order is what makes overlap exact: a decode row
reads the token that the step before it left in `last_tokens`, and the host never sees it in between.
It never waits for the device, never decides what runs, and knows requests only as slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine import inputs
from tokenspeed.engine.inputs import PlanView, StepArrays
from tokenspeed.engine.transfer import PinnedTransfer, Transfer, share_memory
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed_kernel import api

KVCaches = list[tuple[torch.Tensor, ...]]


class Model(Protocol):
    """What the runner asks of a model; `models.load_model` gives one."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits float32 [S, vocabulary] of the batch's sample_indices."""


class Sampler(Protocol):
    """What the runner asks of a sampler; `sampling.Sampler` is one."""

    def set_slot(
        self, slot: int, params: SamplingParams, prompt_ids: NDArray[np.int32], output_ids: NDArray[np.int32]
    ) -> None: ...

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        num_logprobs: int | None,
        host_slots: NDArray[np.int64] | None,
    ) -> SampleOutput: ...


class SampleOutput(Protocol):
    """tokens int32 [S]; the others float32 [S], float32 [S, n] and int32 [S, n], or None when not asked for."""

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def token_logprobs(self) -> torch.Tensor | None: ...
    @property
    def top_values(self) -> torch.Tensor | None: ...
    @property
    def top_ids(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A request that got a slot in this step: what the sampler must know of it."""

    slot: int
    params: SamplingParams
    prompt_ids: NDArray[np.int32]
    output_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step to run. num_logprobs: alternatives per sampled token, None for no logprobs at all."""

    plan: PlanView
    new_slots: list[NewSlot]
    num_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's result while it is still on the device. `output` is None when no row sampled."""

    num_rows: int
    sample_rows: NDArray[np.int64]
    output: SampleOutput | None


class ModelRunner:
    """block_tables: the scheduler's live int32 view [num_slots, max_blocks]. num_buffers: steps that may be unsettled
    at once, plus one."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        caches: KVCaches,
        block_tables: NDArray[np.int32],
        block_size: int,
        num_buffers: int,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._caches = caches
        self._flat_caches = [tensor for layer in caches for tensor in layer]
        self._block_tables = block_tables
        self._block_size = block_size
        self._device = self._flat_caches[0].device
        self._last_tokens = torch.zeros(len(block_tables), dtype=torch.int64, device=self._device)
        on_cpu = self._device.type == "cpu"
        self._transfer: Transfer = share_memory if on_cpu else PinnedTransfer(self._device, num_buffers)
        self._mirror = None if on_cpu else torch.zeros(block_tables.shape, dtype=torch.int32, device=self._device)

    @torch.inference_mode()
    def run(self, work: StepWork) -> Sampled:
        """Launch one step: copies, forward, sampling. On a GPU it returns before any of it has happened."""
        for new in work.new_slots:
            self._sampler.set_slot(new.slot, new.params, new.prompt_ids, new.output_ids)
        arrays = inputs.build(work.plan, self._block_tables, self._block_size)
        batch, sample_slots, sample_positions = self._batch(work.plan, arrays)
        logits = self._model.forward(batch)
        if not len(arrays.sample_rows):
            return Sampled(len(arrays.slots), arrays.sample_rows, None)
        output = self._sampler.sample(logits, sample_slots, sample_positions, work.num_logprobs, arrays.sample_slots)
        self._last_tokens[sample_slots] = output.tokens.to(torch.int64)
        return Sampled(len(arrays.slots), arrays.sample_rows, output)

    def _batch(self, plan: PlanView, arrays: StepArrays) -> tuple[ForwardBatch, torch.Tensor, torch.Tensor]:
        block_copies = np.array(plan.block_copies)
        tensors = self._transfer(
            [
                arrays.slots,
                arrays.query_start,
                arrays.kv_lens,
                arrays.positions,
                arrays.slot_mapping,
                arrays.prompt_token_ids,
                arrays.sample_indices,
                arrays.sample_slots,
                arrays.sample_positions,
                self._host_tables(plan, arrays),
                block_copies,
            ]
        )
        slots, query_start, kv_lens, positions, slot_mapping, prompt, indices = tensors[:7]
        sample_slots, sample_positions, tables, copies = tensors[7:]
        if len(block_copies):
            api.copy_blocks(self._flat_caches, copies)
        if self._mirror is not None:
            tables = self._mirrored(tables, slots, arrays.num_columns)
        decodes = self._last_tokens[slots[: arrays.num_decode_rows]]
        attention = api.AttentionMetadata(
            block_tables=tables,
            query_start=query_start,
            kv_lens=kv_lens,
            max_query_len=arrays.max_query_len,
            max_kv_len=arrays.max_kv_len,
            num_decode_rows=arrays.num_decode_rows,
        )
        token_ids = torch.cat([decodes, prompt]) if len(arrays.prompt_token_ids) else decodes
        batch = ForwardBatch(token_ids, positions, slot_mapping, indices, attention, self._caches)
        return batch, sample_slots, sample_positions

    def _host_tables(self, plan: PlanView, arrays: StepArrays) -> NDArray[np.int32]:
        """The CPU's block tables of this step's rows; for a GPU, the cells that changed since the last plan."""
        if self._mirror is None:
            return self._block_tables[arrays.slots, : arrays.num_columns]
        return last_writes(plan.table_updates, self._block_tables.shape[1])

    def _mirrored(self, updates: torch.Tensor, slots: torch.Tensor, num_columns: int) -> torch.Tensor:
        assert self._mirror is not None
        if updates.shape[0]:
            self._mirror[updates[:, 0].long(), updates[:, 1].long()] = updates[:, 2]
        return self._mirror[slots, :num_columns]


def last_writes(updates: NDArray[np.int32], num_columns: int) -> NDArray[np.int32]:
    """Of (slot, column, block) writes in order, the last one of each cell: a device applies them in any order."""
    if len(updates) < 2:
        return np.array(updates)
    cells = updates[:, 0].astype(np.int64) * num_columns + updates[:, 1]
    _, from_the_end = np.unique(cells[::-1], return_index=True)
    return updates[len(updates) - 1 - from_the_end]
