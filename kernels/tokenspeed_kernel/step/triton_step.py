# SPDX-License-Identifier: MIT
# mypy: disable-error-code="no-untyped-def"
"""Inputs of a step in Triton: three small kernels whose grids depend on capacities, so that graphs may hold them."""

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
