# SPDX-License-Identifier: MIT
"""One forward and one draw of tokens, on the device. The runner owns the KV tensors and the last token of every slot.

Called by one thread, in the order in which steps were planned; that order is what makes overlap exact: a decode row
reads the token that the step before it left in `last_tokens`, and the host never sees it in between.
It never waits for the device, never decides what runs, and knows requests only as slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine import inputs
from tokenspeed.engine.device_state import DeviceState, last_writes
from tokenspeed.engine.errors import EngineFault
from tokenspeed.engine.graphs import DecodeGraphs
from tokenspeed.engine.inputs import PlanView, StepArrays
from tokenspeed.engine.kv_pool import KVCaches
from tokenspeed.engine.pieces import PrefillPieces
from tokenspeed.engine.prompt_scores import PromptRow
from tokenspeed.engine.replay import DecodeRecordings
from tokenspeed.engine.transfer import PinnedTransfer, Transfer, share_memory
from tokenspeed.grammar import CompiledGrammar
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.models.model import Hidden
from tokenspeed.sampling import RowFailure, chosen_logprobs
from tokenspeed_kernel import api


class Model(Protocol):
    """What the runner asks of a model; `models.load_model` gives one."""

    def hidden(self, batch: ForwardBatch) -> Hidden:
        """What the layers make of every token."""

    def logits(self, hidden: Hidden, batch: ForwardBatch) -> torch.Tensor:
        """Logits float32 [S, vocabulary] of the batch's sample_indices."""


class AbsentModel:
    """What a runner has while its weights sleep; no step may reach it."""

    def hidden(self, batch: ForwardBatch) -> Hidden:
        raise EngineFault("a step was launched while the weights sleep")

    def logits(self, hidden: Hidden, batch: ForwardBatch) -> torch.Tensor:
        raise EngineFault("a step was launched while the weights sleep")


ABSENT_MODEL = AbsentModel()


class Sampler(Protocol):
    """What the runner asks of a sampler; `sampling.Sampler` is one."""

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
        grammar: CompiledGrammar | None,
    ) -> None: ...

    def prepare(self, slots: NDArray[np.int64]) -> None:
        """Begin what the host has to work out for a step that samples for these slots."""

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        num_logprobs: int | None,
        host_slots: NDArray[np.int64] | None,
    ) -> SampleOutput: ...

    def plain_draw(self, host_slots: NDArray[np.int64], num_logprobs: int | None) -> bool | None: ...


class SampleOutput(Protocol):
    """tokens int32 [S]; logprobs float32 [S], float32 [S, n] and int32 [S, n], chosen float32 [S, m] and nan_rows bool
    [S], or None when not asked for. On the device, or in memory of the host that the device writes. failures: (row of
    S, why) of rows whose requests cannot go on."""

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def token_logprobs(self) -> torch.Tensor | None: ...
    @property
    def top_values(self) -> torch.Tensor | None: ...
    @property
    def top_ids(self) -> torch.Tensor | None: ...
    @property
    def chosen(self) -> torch.Tensor | None: ...
    @property
    def nan_rows(self) -> torch.Tensor | None: ...
    @property
    def failures(self) -> list[tuple[int, RowFailure]]: ...


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A request that got a slot in this step: what the sampler must know of it."""

    slot: int
    params: SamplingParams
    prompt_ids: NDArray[np.int32]
    output_ids: NDArray[np.int32]
    grammar: CompiledGrammar | None


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step to run. num_logprobs: alternatives per sampled token, None for no logprobs at all. prompt_rows: prompts
    whose own tokens are to be scored."""

    plan: PlanView
    new_slots: list[NewSlot]
    num_logprobs: int | None
    prompt_rows: list[PromptRow]


Scores = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]
"""(request id, values float32 [n], top values float32 [n, k], top ids int32 [n, k]) on the device; as `PromptPiece`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's result while it is still on the device. `output` is None when no row sampled."""

    num_rows: int
    sample_rows: NDArray[np.int64]
    output: SampleOutput | None
    scores: list[Scores]


@dataclass(frozen=True, slots=True)
class Captured:
    """decode: whole steps that only decode. prefill: the layers of others. recordings: a CPU's steps that only decode,
    recorded when they first come. None: every such step runs eagerly."""

    decode: DecodeGraphs | None
    prefill: PrefillPieces | None
    recordings: DecodeRecordings | None = None


NOTHING_CAPTURED = Captured(None, None)


class ModelRunner:
    """block_tables: the scheduler's live int32 view [num_slots, max_blocks]. num_buffers: steps that may be unsettled
    at once, plus one. scored_at_once: rows of logits of a prompt that exist at the same time while it is scored.
    captured: what was captured over the same state, to run steps with."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        caches: KVCaches,
        block_tables: NDArray[np.int32],
        state: DeviceState,
        num_buffers: int,
        scored_at_once: int,
        captured: Captured = NOTHING_CAPTURED,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._caches = caches
        self._flat_caches = [tensor for layer in caches for tensor in layer]
        self._block_tables = block_tables
        self._block_size = state.block_size
        self._state = state
        self._captured = captured
        self._scored_at_once = scored_at_once
        on_cpu = state.device.type == "cpu"
        self._transfer: Transfer = share_memory if on_cpu else PinnedTransfer(state.device, num_buffers)

    def replace_model(self, model: Model) -> None:
        """Run `model`, of the same shape, from the next step on. No step may be in flight; for captured
        ones weights are overwritten instead."""
        self._model = model
        if self._captured.recordings is not None:
            self._captured.recordings.forget()

    @torch.inference_mode()
    def run(self, work: StepWork) -> Sampled:
        """Launch one step: copies, forward, sampling. On a GPU it returns before any of it has happened."""
        for new in work.new_slots:
            self._sampler.set_slot(new.slot, new.params, new.prompt_ids, new.output_ids, new.grammar)
        graphs = self._captured.decode
        if graphs is not None and graphs.fit(work.plan):
            return self._play(graphs, work)
        arrays = inputs.build(work.plan, self._block_tables, self._block_size)
        self._sampler.prepare(arrays.sample_slots)
        batch, sample_slots, sample_positions = self._batch(work.plan, arrays)
        logits, scores = self._forward(batch, arrays, work.prompt_rows)
        if logits is None:
            return Sampled(len(arrays.slots), arrays.sample_rows, None, scores)
        output = self._sampler.sample(logits, sample_slots, sample_positions, work.num_logprobs, arrays.sample_slots)
        api.keep_tokens(output.tokens, sample_slots, self._state.last_tokens)
        return Sampled(len(arrays.slots), arrays.sample_rows, output, scores)

    def _forward(
        self, batch: ForwardBatch, arrays: StepArrays, prompt_rows: list[PromptRow]
    ) -> tuple[torch.Tensor | None, list[Scores]]:
        """Logits of the rows that sample, None where none does, and the scores of prompts."""
        recordings, pieces = self._captured.recordings, self._captured.prefill
        if recordings is not None and not prompt_rows and recordings.fit(batch):
            return recordings.logits(self._model, batch), []
        layers = self._model.hidden if pieces is None or not pieces.fit(len(batch.token_ids)) else pieces.play
        hidden = layers(batch)
        scores = [self._scored(row, arrays, hidden, batch) for row in prompt_rows]
        return self._model.logits(hidden, batch) if len(arrays.sample_rows) else None, scores

    def _scored(self, row: PromptRow, arrays: StepArrays, hidden: Hidden, batch: ForwardBatch) -> Scores:
        """Logprobs of a prompt's tokens, a few rows of logits at a time."""
        first = int(arrays.query_start[row.row]) + row.offset
        indices = torch.arange(first, first + len(row.targets), device=self._state.device)
        targets = torch.from_numpy(row.targets).to(self._state.device, non_blocking=True)
        parts = []
        for at in range(0, len(row.targets), self._scored_at_once):
            piece = slice(at, at + self._scored_at_once)
            logits = self._model.logits(hidden, replace(batch, sample_indices=indices[piece]))
            parts.append(_with_chosen(logits, row.chosen, api.logprobs(logits, targets[piece], row.top_n)))
        values, top_values, top_ids = (torch.cat(column) for column in zip(*parts))
        return row.request_id, values, top_values, top_ids

    def _play(self, graphs: DecodeGraphs, work: StepWork) -> Sampled:
        """A captured step; what it cannot draw itself is drawn from its logits."""
        num_rows = work.plan.num_rows
        host_slots, rows = work.plan.slots.astype(np.int64), np.arange(num_rows)
        self._sampler.prepare(host_slots)
        noise = self._sampler.plain_draw(host_slots, work.num_logprobs)
        left = graphs.play(work.plan, bool(noise))
        if noise is not None:
            return Sampled(num_rows, rows, PlainOutput(left.host_tokens[:num_rows]), [])
        slots = left.slots[:num_rows]
        output = self._sampler.sample(
            left.logits[:num_rows], slots, left.positions[:num_rows], work.num_logprobs, host_slots
        )
        api.keep_tokens(output.tokens, slots, self._state.last_tokens)
        return Sampled(num_rows, rows, output, [])

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
                *self._host_tables(plan, arrays),
                block_copies,
            ]
        )
        slots, query_start, kv_lens, positions, slot_mapping, prompt, indices = tensors[:7]
        sample_slots, sample_positions, *tables, copies = tensors[7:]
        if len(block_copies):
            api.copy_blocks(self._flat_caches, copies)
        attention = api.AttentionMetadata(
            block_tables=self._row_tables(tables, slots),
            query_start=query_start,
            kv_lens=kv_lens,
            max_query_len=arrays.max_query_len,
            max_kv_len=self._max_kv_len(arrays),
            num_decode_rows=arrays.num_decode_rows,
        )
        token_ids = prompt
        if arrays.num_decode_rows:
            decodes = self._state.last_tokens[slots[: arrays.num_decode_rows]]
            token_ids = torch.cat([decodes, prompt]) if len(arrays.prompt_token_ids) else decodes
        batch = ForwardBatch(token_ids, positions, slot_mapping, indices, attention, self._caches)
        return batch, sample_slots, sample_positions

    def _host_tables(self, plan: PlanView, arrays: StepArrays) -> list[NDArray[np.int32]]:
        """The block tables of this step's rows; for a mirror, the cells that changed since the last plan."""
        if not self._state.mirrored:
            return [self._block_tables[arrays.slots, : arrays.num_columns]]
        updates = last_writes(plan.table_updates, self._block_tables.shape[1])
        return [updates, np.array([len(updates)], np.int32)]

    def _row_tables(self, sent: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        if not self._state.mirrored:
            return sent[0]
        updates, count = sent
        api.update_tables(self._state.tables, updates, count)
        # Whole rows: their stride is a constant of the kernels that read them.
        return self._state.tables.index_select(0, slots)

    def _max_kv_len(self, arrays: StepArrays) -> int:
        """An upper bound; on a mirror the same in every step, since kernels are specialised on what it decides."""
        return self._state.tables.shape[1] * self._block_size if self._state.mirrored else arrays.max_kv_len


def _with_chosen(
    logits: torch.Tensor, chosen: tuple[int, ...], scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With the tokens that the request names behind the likeliest ones."""
    if not chosen:
        return scores
    values, top_values, top_ids = scores
    ids = torch.tensor([chosen], dtype=torch.int64).to(logits.device).expand(len(logits), -1)
    named = chosen_logprobs(logits, ids)
    return values, torch.cat([top_values, named], 1), torch.cat([top_ids, ids.to(top_ids.dtype)], 1)


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """A `SampleOutput` of tokens alone, which the step itself writes to the host's memory."""

    tokens: torch.Tensor
    token_logprobs: None = None
    top_values: None = None
    top_ids: None = None
    chosen: None = None
    nan_rows: None = None
    failures: list[tuple[int, RowFailure]] = field(default_factory=list)
