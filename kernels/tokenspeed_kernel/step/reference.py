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
