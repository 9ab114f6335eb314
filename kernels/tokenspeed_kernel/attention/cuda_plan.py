# SPDX-License-Identifier: MIT
"""What the CUDA kernels of paged attention work out once a step for all its layers, on the device.

csrc/cuda/decode_plan.cu finds rows that share a prefix and cuts keys into parts, latent_plan.cu gives blocks equal
shares of latents, prefill_plan.cu orders tiles of queries by length. Their results live as long as the step's metadata,
which keeps them. Sizes of memory and grids depend on host integers only, so a captured step holds the plan's kernel and
plans anew each time it is played.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.cuda_driver import CudaModule

MOST_ROWS = 1024
"""Rows that one plan is made for; steps with more rows have several."""
_KEY_TILE = 64
_MOST_SHARED_PARTS = 16
_MOST_OWN_PARTS = 64
_DECODE_WAVES = 3
_PREFILL_WAVES = 6
_SCRATCH = 1 << 17
_DECODE_COUNTER, _QUEUE = _SCRATCH - 1, _SCRATCH - 3

_DECODE = CudaModule("decode_plan")
_PREFILL = CudaModule("prefill_plan")
_LATENT = CudaModule("latent_plan")


_DECODE_SHAPE = ("num_rows", "block_size", "slots", "rows_per_tile", "most_shared", "least_saved")


class _DecodePlanShape(ctypes.Structure):
    """PlanShape of decode_plan.cu."""

    _fields_ = (
        *((name, ctypes.c_int) for name in _DECODE_SHAPE),
        ("least_share", ctypes.c_float),
        ("table_stride", ctypes.c_int64),
    )


class _PrefillPlanShape(ctypes.Structure):
    """PrefillPlanShape of prefill_plan.cu."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("num_rows", "first_row", "tokens_per_tile", "num_jobs", "num_cores", "most_pieces")
    )


class _LatentPlanShape(ctypes.Structure):
    """LatentPlanShape of latent_plan.cu."""

    _fields_ = (("num_rows", ctypes.c_int), ("num_blocks", ctypes.c_int), ("least_share", ctypes.c_float))


@dataclass(frozen=True)
class DecodeCut:
    """How decoding cuts its rows. slots: parts of rows that run at once. rows_per_tile: rows of a group that read its
    keys together; 0: rows that share blocks read them apart. least_saved: tokens that a group must save. least_share: a
    part has at least the root of this times the longest row's tiles, for parts are added up by one block."""

    block_size: int
    slots: int
    rows_per_tile: int = 0
    least_saved: int = 0
    least_share: float = 0.0


@dataclass(frozen=True)
class PrefillCut:
    """How a prefill cuts its rows. tokens_per_tile: whose queries a job has. num_jobs: jobs of the same queries, for
    different heads. cores: to keep busy by cutting keys too; 0: keys are not cut."""

    tokens_per_tile: int
    num_jobs: int
    cores: int


@dataclass(frozen=True)
class DecodePlan:
    """The rows [first_row, first_row + num_rows) of a step, which have one query each.

    memory: int32, as decode_plan.cuh describes it. most_items, most_parts: bounds of what it can hold.
    """

    first_row: int
    num_rows: int
    memory: torch.Tensor
    most_items: int
    most_parts: int


@dataclass(frozen=True)
class PrefillPlan:
    """Some rows with many queries. memory: int32, as prefill_plan.cuh describes it. most_jobs: bound of what it can
    hold. most_pieces: jobs with a piece of their queries' keys, those for other heads counted too."""

    memory: torch.Tensor
    most_jobs: int
    most_pieces: int


def decode_plans(meta: AttentionMetadata, cut: DecodeCut) -> list[DecodePlan]:
    """Plans of the step's decode rows, made at the first call of a step."""
    key = ("decode", cut)
    if key not in meta.plans:
        rows = range(0, meta.num_decode_rows, MOST_ROWS)
        meta.plans[key] = [_plan_decode(meta, cut, row, min(MOST_ROWS, meta.num_decode_rows - row)) for row in rows]
    plans: list[DecodePlan] = meta.plans[key]
    return plans


def prefill_plans(meta: AttentionMetadata, cut: PrefillCut, num_tokens: int) -> list[PrefillPlan]:
    """Plans of the step's other rows, made at the first call of a step. num_tokens: of the whole step."""
    key = ("prefill", cut)
    if key not in meta.plans:
        first, end = meta.num_decode_rows, meta.kv_lens.shape[0]
        rows = range(first, end, MOST_ROWS)
        meta.plans[key] = [_plan_prefill(meta, cut, row, min(MOST_ROWS, end - row), num_tokens) for row in rows]
    plans: list[PrefillPlan] = meta.plans[key]
    return plans


def latent_plan(meta: AttentionMetadata, num_blocks: int, least_share: float) -> torch.Tensor:
    """How blocks share the keys of the step's decode rows: int32, as latent_plan.cuh describes it; made at the
    first call of a step. least_share: as of DecodeCut."""
    key = ("latent", num_blocks, least_share)
    if key not in meta.plans:
        rows, device = meta.num_decode_rows, meta.kv_lens.device
        memory = torch.empty(4 + num_blocks + rows + 1, dtype=torch.int32, device=device)
        shape = _LatentPlanShape(rows, num_blocks, least_share)
        _LATENT.launch("latent_plan", device, 1, 1024, (*addresses(meta.kv_lens, memory), shape))
        meta.plans[key] = memory
    plan: torch.Tensor = meta.plans[key]
    return plan


def counters(device: torch.device) -> torch.Tensor:
    """int32 zeros that every launch leaves so; the last three are the plan's and the queue of prefill jobs."""
    return _counters(device)


def queue(device: torch.device) -> torch.Tensor:
    """The two numbers of the queue of prefill jobs."""
    return _counters(device)[_QUEUE : _QUEUE + 2]


@functools.cache
def num_cores(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def most_own_parts(num_rows: int, slots: int, max_kv_len: int) -> int:
    """Parts that rows can come in besides their groups' ones."""
    by_length = num_rows * min(-(-max_kv_len // _KEY_TILE), _MOST_OWN_PARTS)
    return min(max(_DECODE_WAVES * slots, num_rows + slots), by_length)


def most_shared_items(num_rows: int, rows_per_tile: int) -> int:
    """Items that groups may have: every pair could be a group, and few groups come in several parts."""
    tiles = -(-num_rows // rows_per_tile)
    return num_rows // 2 + _MOST_SHARED_PARTS // 2 * tiles + _MOST_SHARED_PARTS if num_rows > 1 else 0


def _plan_decode(meta: AttentionMetadata, cut: DecodeCut, first_row: int, num_rows: int) -> DecodePlan:
    device, tables = meta.kv_lens.device, meta.block_tables[first_row:]
    shared = most_shared_items(num_rows, cut.rows_per_tile) if cut.rows_per_tile else 0
    own = most_own_parts(num_rows, cut.slots, meta.max_kv_len)
    before_items = (4 + 5 * num_rows + 3) // 4 * 4
    memory = torch.empty(before_items + 4 * (own + shared), dtype=torch.int32, device=device)
    per_tile = cut.rows_per_tile if shared else 0
    sizes = (num_rows, cut.block_size, cut.slots, per_tile, shared, cut.least_saved)
    shape = _DecodePlanShape(*sizes, cut.least_share, meta.block_tables.stride(0))
    numbers = (tables, meta.kv_lens[first_row:], memory, _counters(device)[_DECODE_COUNTER:])
    _DECODE.launch("decode_plan", device, num_rows, 256, (*addresses(*numbers), shape))
    parts = own + (num_rows * _MOST_SHARED_PARTS if shared else 0)
    return DecodePlan(first_row, num_rows, memory, own + shared, parts)


def _plan_prefill(
    meta: AttentionMetadata, cut: PrefillCut, first_row: int, num_rows: int, num_tokens: int
) -> PrefillPlan:
    device = meta.kv_lens.device
    most_tiles = -(-num_tokens // cut.tokens_per_tile) + num_rows
    most_pieces = _PREFILL_WAVES * cut.cores
    if most_tiles * cut.num_jobs >= most_pieces:
        most_pieces = 0
    most_jobs = most_tiles + -(-most_pieces // cut.num_jobs)
    memory = torch.empty(4 + 8 * most_jobs, dtype=torch.int32, device=device)
    shape = _PrefillPlanShape(num_rows, first_row, cut.tokens_per_tile, cut.num_jobs, cut.cores, most_pieces)
    numbers = (meta.query_start, meta.kv_lens, memory)
    _PREFILL.launch("prefill_plan", device, 1, 1024, (*addresses(*numbers), shape))
    return PrefillPlan(memory, most_jobs, most_pieces)


def addresses(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of a launch."""
    return tuple(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(_SCRATCH, dtype=torch.int32, device=device)
