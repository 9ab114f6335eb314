# SPDX-License-Identifier: MIT
"""Inputs of a step in plain torch."""

from __future__ import annotations

import torch

from tokenspeed_kernel.registry import Band, anywhere, kernel


@kernel("step.update_tables", name="reference", needs=anywhere(), dtypes=(torch.int32,), band=Band.REFERENCE)
def update_tables(tables: torch.Tensor, updates: torch.Tensor, count: torch.Tensor) -> None:
    """Reads `count`, so on a device it waits."""
    slots, columns, blocks = updates[: int(count[0])].unbind(1)
    tables[slots.long(), columns.long()] = blocks


@kernel("step.decode_inputs", name="reference", needs=anywhere(), dtypes=(torch.int32,), band=Band.REFERENCE)
def decode_inputs(
    rows: torch.Tensor, last_tokens: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, ...]:
    """Gathers by slot."""
    slots, positions = rows.long().unbind(0)
    blocks = tables[slots, positions // block_size].long()
    slot_mapping = blocks * block_size + positions % block_size
    return last_tokens[slots], positions, slot_mapping, slots, positions + 1, rows[1] + 1, tables[slots]


@kernel("step.keep_tokens", name="reference", needs=anywhere(), dtypes=(torch.int32,), band=Band.REFERENCE)
def keep_tokens(tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """A scatter."""
    last_tokens[slots] = tokens.to(last_tokens.dtype)


@kernel("step.receive", name="reference", needs=anywhere(), dtypes=(torch.int32,), band=Band.REFERENCE)
def receive(ring: torch.Tensor, turn: torch.Tensor, tables: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Reads `turn` and the count of updates, so on a device it waits."""
    record = ring[int(turn[0])]
    rows, updates = record[4 : 4 + 2 * num_rows], record[4 + 2 * num_rows :]
    update_tables(tables, updates[: len(updates) // 3 * 3].view(-1, 3), record[:1])
    return rows.view(2, num_rows).to(tables.device, copy=True)


@kernel("step.publish", name="reference", needs=anywhere(), dtypes=(torch.int32,), band=Band.REFERENCE)
def publish(
    tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor
) -> None:
    """A scatter, a copy and an addition."""
    keep_tokens(tokens, slots, last_tokens)
    ring[int(turn[0]), : len(tokens)] = tokens.to(ring.device)
    turn[0] = (turn[0] + 1) % len(ring)
