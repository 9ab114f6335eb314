# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Inputs of a step in Triton: small kernels whose grids depend on capacities, so that graphs may hold them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.registry import Band, cuda, kernel

_UPDATES_PER_PROGRAM = 128
_MAX_COLUMNS_PER_PROGRAM = 1024


@triton.jit
def update_tables_kernel(tables, updates, count, num_columns, BLOCK: tl.constexpr):
    """A lane a cell."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(count)
    slot = tl.load(updates + 3 * at, mask=inside, other=0).to(tl.int64)
    column = tl.load(updates + 3 * at + 1, mask=inside, other=0)
    block = tl.load(updates + 3 * at + 2, mask=inside, other=0)
    tl.store(tables + slot * num_columns + column, block, mask=inside)


@triton.jit
def decode_inputs_kernel(
    rows, last_tokens, tables, token_ids, positions, slot_mapping, slots, new_positions, kv_lens, row_tables,
    num_columns, block_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row's table; the programs of the first columns write the row's numbers too."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    slot = tl.load(rows + row).to(tl.int64)
    table = tables + slot * num_columns
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    tl.store(row_tables + row * num_columns + column, tl.load(table + column, mask=inside, other=0), mask=inside)
    if tl.program_id(1) == 0:
        position = tl.load(rows + num_rows + row)
        block = tl.load(table + position // block_size).to(tl.int64)
        tl.store(token_ids + row, tl.load(last_tokens + slot))
        tl.store(positions + row, position.to(tl.int64))
        tl.store(slot_mapping + row, block * block_size + position % block_size)
        tl.store(slots + row, slot)
        tl.store(new_positions + row, position.to(tl.int64) + 1)
        tl.store(kv_lens + row, position + 1)


@triton.jit(do_not_specialize=["num_rows"])
def keep_tokens_kernel(tokens, slots, last_tokens, num_rows, BLOCK: tl.constexpr):
    """A lane a row."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=0)
    tl.store(last_tokens + slot, tl.load(tokens + row, mask=inside, other=0).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "length"])
def receive_kernel(ring, turn, tables, rows, length, num_rows, num_columns, BLOCK: tl.constexpr):
    """A lane a number of the rows, and a cell of the tables. The ring is the host's: every read goes there anew, and
    all of them at once, because each takes microseconds; what does not count is dropped when it is stored."""
    record = ring + tl.load(turn).to(tl.int64) * length
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = at < 2 * num_rows
    first = 4 + 2 * num_rows + 3 * at
    there = first + 2 < length
    count = tl.load(record, volatile=True)
    number = tl.load(record + 4 + at, mask=mine, other=0, volatile=True)
    slot = tl.load(record + first, mask=there, other=0, volatile=True).to(tl.int64)
    column = tl.load(record + first + 1, mask=there, other=0, volatile=True)
    block = tl.load(record + first + 2, mask=there, other=0, volatile=True)
    tl.store(rows + at, number, mask=mine)
    tl.store(tables + slot * num_columns + column, block, mask=there & (at < count))


@triton.jit(do_not_specialize=["num_rows", "length", "num_turns"])
def publish_kernel(tokens, slots, last_tokens, ring, turn, num_rows, length, num_turns, BLOCK: tl.constexpr):
    """One program, so that the turn moves on when all of it has been read."""
    mine = tl.load(turn)
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    token = tl.load(tokens + row, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=0)
    tl.store(last_tokens + slot, token.to(tl.int64), mask=inside)
    tl.store(ring + mine.to(tl.int64) * length + row, token, mask=inside)
    tl.debug_barrier()
    tl.store(turn, (mine + 1) % num_turns)


@kernel("step.update_tables", name="triton", needs=cuda(8), dtypes=(torch.int32,), band=Band.PORTABLE)
def update_tables(tables: torch.Tensor, updates: torch.Tensor, count: torch.Tensor) -> None:
    """One launch over the capacity of `updates`."""
    if not (tables.is_contiguous() and updates.is_contiguous()):
        raise ValueError("tables and updates must be contiguous")
    grid = (triton.cdiv(updates.shape[0], _UPDATES_PER_PROGRAM),)
    if grid[0]:
        update_tables_kernel[grid](tables, updates, count, tables.shape[1], BLOCK=_UPDATES_PER_PROGRAM, num_warps=4)


@kernel("step.decode_inputs", name="triton", needs=cuda(8), dtypes=(torch.int32,), band=Band.PORTABLE)
def decode_inputs(
    rows: torch.Tensor, last_tokens: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, ...]:
    """One launch."""
    if not (rows.is_contiguous() and tables.is_contiguous()):
        raise ValueError("rows and tables must be contiguous")
    num_rows, num_columns = rows.shape[1], tables.shape[1]
    wide = [torch.empty(num_rows, dtype=torch.int64, device=rows.device) for _ in range(5)]
    kv_lens = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
    row_tables = torch.empty(num_rows, num_columns, dtype=torch.int32, device=rows.device)
    block = min(triton.next_power_of_2(num_columns), _MAX_COLUMNS_PER_PROGRAM)
    decode_inputs_kernel[(num_rows, triton.cdiv(num_columns, block))](
        rows, last_tokens, tables, *wide, kv_lens, row_tables, num_columns, block_size, BLOCK=block, num_warps=4
    )
    return (*wide, kv_lens, row_tables)


@kernel("step.keep_tokens", name="triton", needs=cuda(8), dtypes=(torch.int32,), band=Band.PORTABLE)
def keep_tokens(tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """One launch."""
    num_rows = tokens.shape[0]
    if num_rows:
        grid = (triton.cdiv(num_rows, _UPDATES_PER_PROGRAM),)
        keep_tokens_kernel[grid](tokens, slots, last_tokens, num_rows, BLOCK=_UPDATES_PER_PROGRAM, num_warps=4)


@kernel("step.receive", name="triton", needs=cuda(8), dtypes=(torch.int32,), band=Band.PORTABLE)
def receive(ring: torch.Tensor, turn: torch.Tensor, tables: torch.Tensor, num_rows: int) -> torch.Tensor:
    """One launch over the capacity of a record."""
    if not (ring.is_contiguous() and tables.is_contiguous()):
        raise ValueError("ring and tables must be contiguous")
    length = ring.shape[1]
    rows = torch.empty(2, num_rows, dtype=torch.int32, device=tables.device)
    lanes = max(2 * num_rows, (length - 4 - 2 * num_rows) // 3)
    receive_kernel[(triton.cdiv(lanes, _UPDATES_PER_PROGRAM),)](
        ring, turn, tables, rows, length, num_rows, tables.shape[1], BLOCK=_UPDATES_PER_PROGRAM, num_warps=4
    )
    return rows


@kernel("step.publish", name="triton", needs=cuda(8), dtypes=(torch.int32,), band=Band.PORTABLE)
def publish(
    tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor
) -> None:
    """One launch of one program."""
    num_rows = tokens.shape[0]
    publish_kernel[(1,)](
        tokens, slots, last_tokens, ring, turn, num_rows, ring.shape[1], ring.shape[0],
        BLOCK=max(32, triton.next_power_of_2(num_rows)), num_warps=4,
    )  # fmt: skip
