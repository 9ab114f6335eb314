# SPDX-License-Identifier: MIT
"""What the engine keeps on the device between steps, and the inputs of a decode step made from it there.

N request slots (the last may stand for padding rows), C columns of a block table, B rows of a decode step.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.registry import ops, solve


def update_tables(tables: torch.Tensor, updates: torch.Tensor, count: torch.Tensor) -> None:
    """Write cells of block tables.

    tables: int32 [N, C], changed.
    updates: int32 [U, 3], (slot, column, block); the cells of those that count are distinct.
    count: int32 [1], how many of `updates` count, from the first on; at most U.
    """
    solve(ops.STEP_UPDATE_TABLES, tables.device.type, tables.dtype)(tables, updates, count)


def decode_inputs(
    rows: torch.Tensor, last_tokens: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Everything that a decode step of B rows reads, one token a row.

    rows: int32 [2, B]: each row's slot, and the tokens that it has in the cache before this step.
    last_tokens: int64 [N], the token that each slot's request produced last.
    tables: int32 [N, C], block tables by slot.

    Returns (token_ids int64 [B], positions int64 [B], slot_mapping int64 [B], slots int64 [B], the positions that the
    new tokens will have int64 [B], kv_lens int32 [B] after this step's write, the rows' block tables int32 [B, C]).
    """
    return solve(ops.STEP_DECODE_INPUTS, rows.device.type, rows.dtype)(rows, last_tokens, tables, block_size)


def keep_tokens(tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """last_tokens[slots] = tokens.

    tokens: int32 [B]. slots: int64 [B], distinct but for padding rows. last_tokens: int64 [N], changed.
    """
    solve(ops.STEP_KEEP_TOKENS, tokens.device.type, tokens.dtype)(tokens, slots, last_tokens)


def receive(ring: torch.Tensor, turn: torch.Tensor, tables: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Take a step's record from the host: its rows, and the changed cells of block tables, which are written.

    ring: int32 [R, L] in memory of the host that the device reads (pinned), a record a turn: how many updates there
        are, three unused numbers, the slots [B] and lengths [B] of the rows, then updates (slot, column, block), whose
        cells are distinct.
    turn: int32 [1] on the device, which record it is.
    tables: int32 [N, C], changed.
    num_rows: B.

    Returns the rows as `decode_inputs` takes them, int32 [2, B].
    """
    return solve(ops.STEP_RECEIVE, tables.device.type, tables.dtype)(ring, turn, tables, num_rows)


def publish(
    tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor
) -> None:
    """`keep_tokens`, and the tokens for the host, and the next turn.

    tokens: int32 [B]. slots: int64 [B], distinct but for padding rows. last_tokens: int64 [N], changed.
    ring: int32 [R, L] in memory of the host that the device writes (pinned), L >= B; row `turn` is changed.
    turn: int32 [1] on the device; becomes (turn + 1) % R.
    """
    solve(ops.STEP_PUBLISH, tokens.device.type, tokens.dtype)(tokens, slots, last_tokens, ring, turn)
