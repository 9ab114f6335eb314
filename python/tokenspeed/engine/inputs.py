# SPDX-License-Identifier: MIT
"""From a plan to the arrays of one forward: vectorised numpy, no loop over rows, nothing that waits for a device.

Called by the thread that launches. Block tables are read in place from the scheduler's live view: the columns that a
step needs were written before its plan was handed out, and later plans only append.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class PlanView(Protocol):
    """The part of the scheduler's `Plan` that a forward reads; see tokenspeed_cc.pyi."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_decode_rows(self) -> int: ...
    @property
    def slots(self) -> Int32: ...
    @property
    def query_lens(self) -> Int32: ...
    @property
    def context_lens(self) -> Int32: ...
    @property
    def samples(self) -> NDArray[np.bool_]: ...
    @property
    def prompt_token_ids(self) -> Int32: ...
    @property
    def block_copies(self) -> Int32: ...
    @property
    def table_updates(self) -> Int32: ...


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Host arrays of one forward over T tokens in R rows, S of which sample. Decode rows come first."""

    slots: Int64
    """[R]"""
    query_start: Int32
    """[R + 1]"""
    kv_lens: Int32
    """[R], after this step's write."""
    positions: Int64
    """[T]"""
    slot_mapping: Int64
    """[T], block * block_size + offset."""
    prompt_token_ids: Int64
    """[T - num_decode_rows]; decode rows take their token from the device."""
    sample_rows: Int64
    """[S]"""
    sample_indices: Int64
    """[S], the token whose logits each sampling row reads."""
    sample_slots: Int64
    """[S]"""
    sample_positions: Int64
    """[S], the place in its sequence that the new token will have."""
    num_decode_rows: int
    num_columns: int
    """Columns of the block tables that this step reads."""
    max_query_len: int
    max_kv_len: int


def build(plan: PlanView, block_tables: Int32, block_size: int) -> StepArrays:
    """Everything but the token ids of decode rows, which only the device knows."""
    slots = plan.slots.astype(np.int64)
    query_lens, context = plan.query_lens, plan.context_lens
    kv_lens = context + query_lens
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(query_lens, out=query_start[1:])
    if plan.num_decode_rows == len(slots):
        positions, token_slots = context.astype(np.int64), slots
    else:
        rows = np.repeat(np.arange(len(slots)), query_lens)
        positions = np.arange(query_start[-1], dtype=np.int64) + (context - query_start[:-1])[rows]
        token_slots = slots[rows]
    blocks = block_tables[token_slots, positions // block_size]
    sample_rows = np.flatnonzero(plan.samples)
    max_kv_len = int(kv_lens.max())
    return StepArrays(
        slots=slots,
        query_start=query_start,
        kv_lens=kv_lens,
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * block_size + positions % block_size,
        prompt_token_ids=plan.prompt_token_ids.astype(np.int64),
        sample_rows=sample_rows,
        sample_indices=query_start[1:][sample_rows].astype(np.int64) - 1,
        sample_slots=slots[sample_rows],
        sample_positions=kv_lens[sample_rows].astype(np.int64),
        num_decode_rows=plan.num_decode_rows,
        num_columns=-(-max_kv_len // block_size),
        max_query_len=int(query_lens.max()),
        max_kv_len=max_kv_len,
    )
