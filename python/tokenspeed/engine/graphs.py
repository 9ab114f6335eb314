# SPDX-License-Identifier: MIT
"""Decode steps that were recorded once and are played back: one launch a step, and no copy.

For each batch size of a list a whole step is captured: slots, lengths and table updates fetched from the host's memory
(`api.receive`), inputs made of them (`api.decode_inputs`), forward, the draw of tokens, the tokens kept for the next
step and written to the host's memory (`api.publish`). A step of fewer rows is padded with rows of the padding slot.
Two kinds exist of each size, for batches that only take the largest logit and for those that draw; whatever else a
request wants (penalties, biases, logprobs) is done eagerly on the logits that the greedy kind leaves behind.
Captured at start, largest first, so that all share one pool of memory. Used by the runner's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.engine.device_state import DeviceState, last_writes
from tokenspeed.engine.inputs import PlanView
from tokenspeed.engine.kv_pool import KVCaches
from tokenspeed.engine.recorder import CudaRecorder, alias
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed_kernel import api

_HEADER = 4
"""Numbers before the rows in a step's record, see `api.receive`."""
_SPARE_UPDATES = 32


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What a captured step leaves behind, padding rows included; valid until the next step is played.

    logits: float32 [B, V]. host_tokens: int32 [B] in the host's memory, there when the step is over and until as many
    more as the ring is long are played. slots, positions: int64 [B], as a sampler takes them.
    """

    logits: torch.Tensor
    host_tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


Play = Callable[[], DecodeOutput]


class StepRecorder(Protocol):
    """How a step is captured: `CudaSteps` on a GPU; on a CPU the step is simply run again."""

    def record(self, step: Play) -> Play: ...

    def shared(self, shape: tuple[int, int]) -> torch.Tensor:
        """int32 of the host that a captured step reads and writes where it lies."""


class RepeatingSteps:
    """Plays a step back by running it, over the same buffers that a graph would use."""

    def record(self, step: Play) -> Play:
        return step

    def shared(self, shape: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)


class CudaSteps:
    """A CUDA graph a step."""

    def __init__(self, recorder: CudaRecorder) -> None:
        self._recorder = recorder

    def record(self, step: Play) -> Play:
        """Runs `step` once first, so that libraries and compilers do outside of the graph what they do only once."""
        with torch.cuda.stream(self._recorder.stream):
            step()
            self._recorder.stream.synchronize()
        captures = self._recorder.captures()
        graph = next(captures)
        try:
            output = step()
        finally:
            captures.close()
        # Of the logits' memory, which is large, smaller graphs may make use too: nobody reads it between two plays.
        left = replace(output, logits=alias(output.logits, graph))

        def play() -> DecodeOutput:
            graph.replay()
            return left

        return play

    def shared(self, shape: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)


class DecodeModel(Protocol):
    def forward(self, batch: ForwardBatch) -> torch.Tensor: ...


class DecodeSampler(Protocol):
    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, noise: bool) -> torch.Tensor:
        """Tokens int32 [S] of rows that need at most noise; may be captured."""


@dataclass(frozen=True)
class Ring:
    """What host and device exchange without a copy: a record and the tokens of each step that may be unsettled.

    records: int32 [n, L]. tokens: int32 [n, B], both the host's. turn: int32 [1] on the device.
    """

    records: torch.Tensor
    tokens: torch.Tensor
    turn: torch.Tensor


class DecodeGraphs:
    """`sizes`: batch sizes to capture, ascending. `padded`: whether a step may use a size larger than its own.
    num_buffers: steps that may be unsettled at once, plus one."""

    def __init__(
        self, sizes: tuple[int, ...], padded: bool, state: DeviceState, num_buffers: int, recorder: StepRecorder
    ) -> None:
        self._sizes = np.array(sizes, np.int64)
        self._padded = padded
        self._state = state
        self._recorder = recorder
        self._played: dict[tuple[int, bool], Play] = {}
        self._turn = 0
        largest, device = sizes[-1], state.device
        self._ring = Ring(
            recorder.shared((num_buffers, _record_size(largest))),
            recorder.shared((num_buffers, largest)),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._records = self._ring.records.numpy()
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(largest, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def capture(self, model: DecodeModel, sampler: DecodeSampler, caches: KVCaches) -> None:
        """Record every size and kind, largest first. Writes to the caches' block 0."""
        for size in self._sizes[::-1].tolist():
            self._records[:] = 0
            self._records[:, _HEADER : _HEADER + size] = self._state.padding_slot
            for noise in (True, False):
                self._played[size, noise] = self._recorder.record(self._step(model, sampler, caches, size, noise))
        self._ring.turn.zero_()

    def fit(self, plan: PlanView) -> bool:
        """Whether a captured step can run the plan: decode rows only, a size for them, nothing to copy."""
        rows = plan.num_rows
        if plan.num_decode_rows != rows or len(plan.block_copies) or rows > self._sizes[-1]:
            return False
        return (self._padded or self._size_for(rows) == rows) and len(plan.table_updates) <= _num_updates(rows)

    def play(self, plan: PlanView, noise: bool) -> DecodeOutput:
        """Write the plan's rows and table updates where the device looks for them, and launch. Waits for nothing."""
        size = self._size_for(plan.num_rows)
        turn, self._turn = self._turn, (self._turn + 1) % len(self._records)
        self._fill(self._records[turn], plan, size)
        left = self._played[size, noise]()
        return replace(left, host_tokens=self._ring.tokens[turn])

    def _fill(self, record: NDArray[np.int32], plan: PlanView, size: int) -> None:
        rows = plan.num_rows
        updates = last_writes(plan.table_updates, self._state.tables.shape[1])
        slots, lengths = record[_HEADER : _HEADER + size], record[_HEADER + size : _HEADER + 2 * size]
        record[0] = len(updates)
        slots[:rows], slots[rows:] = plan.slots, self._state.padding_slot
        lengths[:rows], lengths[rows:] = plan.context_lens, 0
        record[_HEADER + 2 * size :][: updates.size] = updates.ravel()

    def _step(self, model: DecodeModel, sampler: DecodeSampler, caches: KVCaches, size: int, noise: bool) -> Play:
        state, ring = self._state, self._ring

        def step() -> DecodeOutput:
            rows = api.receive(ring.records, ring.turn, state.tables, size)
            token_ids, positions, slot_mapping, slots, new_positions, kv_lens, tables = api.decode_inputs(
                rows, state.last_tokens, state.tables, state.block_size
            )
            attention = api.AttentionMetadata(
                block_tables=tables,
                query_start=self._query_start[: size + 1],
                kv_lens=kv_lens,
                max_query_len=1,
                max_kv_len=tables.shape[1] * state.block_size,
                num_decode_rows=size,
            )
            batch = ForwardBatch(token_ids, positions, slot_mapping, self._rows[:size], attention, caches)
            logits = model.forward(batch)
            tokens = sampler.draw(logits, slots, new_positions, noise)
            api.publish(tokens, slots, state.last_tokens, ring.tokens, ring.turn)
            return DecodeOutput(logits, ring.tokens[0], slots, new_positions)

        return step

    def _size_for(self, rows: int) -> int:
        return int(self._sizes[np.searchsorted(self._sizes, rows)])


def _record_size(size: int) -> int:
    return _HEADER + 2 * size + 3 * _num_updates(size)


def _num_updates(size: int) -> int:
    """Table updates that a record of `size` rows has room for: each row may need a block, and a few more."""
    return size + _SPARE_UPDATES
