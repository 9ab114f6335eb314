# SPDX-License-Identifier: MIT
"""Steps that no request asked for: made up to measure what a step takes and to compile what steps run.

Called at start, before there is a scheduler. All rows read and write block 0, which no request ever gets, so their
results mean nothing and nobody's cache changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.config.resolve import SchedulerLimits
from tokenspeed.engine.device_state import DeviceState
from tokenspeed.engine.kv_pool import KVCaches
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed_kernel import api

_TILE_EDGES = (16, 32, 64, 128)
"""Kernels of prefill rows are compiled for query lengths up to these and above."""
_FIRST_ROWS = (0, 1, 2, 16)
"""Integers that compilers tell apart: one, multiples of 16, and others."""


def batch_of(state: DeviceState, caches: KVCaches, num_decodes: int, query_lens: Sequence[int]) -> ForwardBatch:
    """`num_decodes` rows of one token, then rows of `query_lens` without a context; every row samples."""
    lengths = np.array([1] * num_decodes + list(query_lens), np.int64)
    query_start = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])

    def send(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(state.device)

    positions = send(np.concatenate([np.arange(length) for length in lengths]))
    table = torch.zeros((len(lengths), state.tables.shape[1]), dtype=torch.int32, device=state.device)
    attention = api.AttentionMetadata(
        block_tables=table,
        query_start=send(query_start),
        kv_lens=send(lengths.astype(np.int32)),
        max_query_len=int(lengths.max()),
        max_kv_len=table.shape[1] * state.block_size,
        num_decode_rows=num_decodes,
    )
    indices = send(query_start[1:].astype(np.int64) - 1)
    ids = torch.zeros_like(positions)
    return ForwardBatch(ids, positions, positions % state.block_size, indices, attention, caches)


def widest(limits: SchedulerLimits) -> list[int]:
    """Query lengths of a step with as many tokens and rows as a step may have."""
    tokens, rows = limits.max_batched_tokens, limits.max_num_seqs
    longest = min(tokens // rows, limits.max_model_len)
    return [min(tokens - longest * (rows - 1), limits.max_model_len), *[longest] * (rows - 1)]


def every_kind(limits: SchedulerLimits, routed: bool) -> Iterator[tuple[int, list[int]]]:
    """(decode rows, query lengths) of steps that reach every variant of the kernels that eager steps run. routed:
    whether tokens are sent to experts, whose tiles grow with the number of tokens."""
    decodes = 1
    while decodes < limits.max_num_seqs:
        yield decodes, []
        decodes *= 2
    yield limits.max_num_seqs, []
    longest = min(limits.max_batched_tokens - _FIRST_ROWS[-1], limits.max_model_len)
    for edge in _TILE_EDGES:
        for first in _FIRST_ROWS:
            if edge <= longest and first < limits.max_num_seqs:
                # One length fills the tile and a whole number of sixteens, one does neither.
                yield first, [edge - first % 16]
                yield first, [edge - 3]
    tokens = 2 * _TILE_EDGES[-1]
    while routed and tokens <= min(limits.max_batched_tokens, limits.max_num_seqs * limits.max_model_len):
        whole, rest = divmod(tokens, limits.max_model_len)
        yield 0, [limits.max_model_len] * whole + [rest] * (rest > 0)
        tokens *= 2
