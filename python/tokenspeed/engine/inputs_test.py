# SPDX-License-Identifier: MIT
"""The arrays of a forward against a loop over rows and tokens, for random mixes of decodes and chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokenspeed.engine import inputs
from tokenspeed.engine.device_state import last_writes

BLOCK = 8


def random_plan(rng: np.random.Generator, num_decodes: int, num_chunks: int) -> Any:
    rows = num_decodes + num_chunks
    query_lens = np.concatenate([np.ones(num_decodes), rng.integers(1, 20, num_chunks)]).astype(np.int32)
    samples = np.concatenate([np.ones(num_decodes, bool), rng.random(num_chunks) < 0.5])
    return SimpleNamespace(
        num_rows=rows,
        num_decode_rows=num_decodes,
        slots=rng.permutation(16)[:rows].astype(np.int32),
        query_lens=query_lens,
        context_lens=rng.integers(0, 40, rows).astype(np.int32),
        samples=samples,
        prompt_token_ids=rng.integers(0, 99, query_lens[num_decodes:].sum()).astype(np.int32),
    )


@pytest.mark.parametrize(("num_decodes", "num_chunks"), [(1, 0), (7, 0), (0, 1), (0, 4), (5, 3), (1, 9)])
def test_every_token_and_row_is_where_a_plain_loop_puts_it(num_decodes: int, num_chunks: int) -> None:
    rng = np.random.default_rng(num_decodes * 100 + num_chunks)
    plan = random_plan(rng, num_decodes, num_chunks)
    tables = rng.permutation(16 * 8).reshape(16, 8).astype(np.int32)
    got = inputs.build(plan, tables, BLOCK)
    positions, slot_mapping, sample_indices, sample_slots, sample_positions = [], [], [], [], []
    for row in range(plan.num_rows):
        slot = plan.slots[row]
        for position in range(plan.context_lens[row], plan.context_lens[row] + plan.query_lens[row]):
            positions.append(position)
            slot_mapping.append(tables[slot, position // BLOCK] * BLOCK + position % BLOCK)
        if plan.samples[row]:
            sample_indices.append(len(positions) - 1)
            sample_slots.append(slot)
            sample_positions.append(positions[-1] + 1)
    assert got.positions.tolist() == positions
    assert got.slot_mapping.tolist() == slot_mapping
    assert got.sample_indices.tolist() == sample_indices
    assert got.sample_slots.tolist() == sample_slots
    assert got.sample_positions.tolist() == sample_positions
    assert got.query_start.tolist() == [0, *np.cumsum(plan.query_lens).tolist()]
    assert got.kv_lens.tolist() == (plan.context_lens + plan.query_lens).tolist()
    assert got.max_kv_len == max(got.kv_lens) and got.max_query_len == max(plan.query_lens)
    assert (got.num_columns - 1) * BLOCK < got.max_kv_len <= got.num_columns * BLOCK
    assert got.prompt_token_ids.tolist() == plan.prompt_token_ids.tolist()


def test_of_several_writes_to_a_cell_the_last_one_counts() -> None:
    rng = np.random.default_rng(0)
    updates = np.stack([rng.integers(0, 3, 60), rng.integers(0, 4, 60), rng.integers(1, 99, 60)], axis=1).astype(
        np.int32
    )
    expected = np.zeros((3, 4), np.int32)
    for slot, column, block in updates:
        expected[slot, column] = block
    got = np.zeros((3, 4), np.int32)
    kept = last_writes(updates, 4)
    got[kept[:, 0], kept[:, 1]] = kept[:, 2]
    assert (got == expected).all() and len(kept) == len({(slot, column) for slot, column, _ in updates})
    assert last_writes(updates[:1], 4).tolist() == updates[:1].tolist()
