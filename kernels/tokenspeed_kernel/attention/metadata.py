# SPDX-License-Identifier: MIT
"""Where each row's queries and cached keys lie in one step; built once a step, read by every layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class RowRange(NamedTuple):
    """Rows [first, first + num_rows), none of more than `max_query_len` queries."""

    first: int
    num_rows: int
    max_query_len: int


@dataclass(frozen=True)
class AttentionMetadata:
    """The rows of one step. Row r owns queries [query_start[r], query_start[r + 1]).

    block_tables: int32 [R, max_blocks]; column c of a row is the block of its KV positions
        [c * block_size, (c + 1) * block_size). Columns past the row's length are never read.
    query_start: int32 [R + 1], the running sum of query lengths, starting at 0.
    kv_lens: int32 [R], KV tokens of the row after this step's write; its queries are the last of them.
    max_query_len, max_kv_len: upper bounds over the rows, known on the host.
    num_decode_rows: rows [0, num_decode_rows) have exactly one query; later rows have any number, one too.
    plans: what solutions work out of the rest at the first layer of a step, for the others; each has its own keys.

    The three tensors live on the queries' device.
    """

    block_tables: torch.Tensor
    query_start: torch.Tensor
    kv_lens: torch.Tensor
    max_query_len: int
    max_kv_len: int
    num_decode_rows: int
    plans: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def decode_rows(self) -> RowRange:
        """Those of one query each."""
        return RowRange(0, self.num_decode_rows, 1)

    @property
    def prefill_rows(self) -> RowRange:
        """The others."""
        return RowRange(self.num_decode_rows, self.kv_lens.shape[0] - self.num_decode_rows, self.max_query_len)
