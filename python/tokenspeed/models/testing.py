# SPDX-License-Identifier: MIT
"""A model driven by hand in tests: paged caches with scattered blocks, rows of any length, no engine.

`PagedSequences` does what scheduler and inputs do in the engine, in the plainest way, so that a test can put any mix
of decode rows and prefill chunks into one step and look at all the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.layers import AttentionMetadata, ForwardBatch
from tokenspeed.models.model import Model


class PagedSequences:
    """`num_sequences` sequences of up to `max_len` tokens; their blocks are dealt out in random order."""

    def __init__(self, model: Model, num_sequences: int, max_len: int, block_size: int = 16) -> None:
        self.model = model
        self.block_size = block_size
        self.columns = -(-max_len // block_size)
        num_blocks = 1 + num_sequences * self.columns
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(num_blocks)) + 1
        self.tables = order.view(num_sequences, self.columns)
        self.lengths = [0] * num_sequences
        # What an unwritten cell holds must not matter.
        self.caches = [
            tuple(tensor.allocate(num_blocks, model.device).fill_(float("nan")) for tensor in layer)
            for layer in model.kv_cache(block_size)
        ]

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[int, Sequence[int]]], samples: bool = True) -> list[torch.Tensor]:
        """One forward. rows: (sequence, its next tokens), rows with a single token first.

        Logits [n, V] of each row's n tokens, or of none of them without `samples`.
        """
        token_ids = torch.tensor([token for _, tokens in rows for token in tokens])
        positions = torch.cat([torch.arange(self.lengths[s], self.lengths[s] + len(t)) for s, t in rows])
        owners = torch.cat([torch.full((len(t),), s) for s, t in rows])
        blocks = self.tables[owners, positions // self.block_size]
        for sequence, tokens in rows:
            self.lengths[sequence] += len(tokens)
        counts = [len(tokens) for _, tokens in rows]
        kv_lens = [self.lengths[sequence] for sequence, _ in rows]
        where = self.model.device
        meta = AttentionMetadata(
            block_tables=self.tables[[sequence for sequence, _ in rows]].int().to(where),
            query_start=torch.tensor([0, *counts]).cumsum(0).int().to(where),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32).to(where),
            max_query_len=max(counts),
            max_kv_len=max(kv_lens),
            num_decode_rows=_num_leading_ones(counts),
        )
        slot_mapping = blocks * self.block_size + positions % self.block_size
        batch = ForwardBatch(
            token_ids.to(where),
            positions.to(where),
            slot_mapping.to(where),
            torch.arange(len(token_ids) if samples else 0).to(where),
            meta,
            self.caches,
        )
        return list(self.model.forward(batch).split(counts if samples else [0] * len(rows)))

    def prefill(self, sequence: int, tokens: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Logits [len(tokens), V], computed in chunks of `chunk` tokens."""
        size = chunk or len(tokens)
        parts = [self.step([(sequence, tokens[at : at + size])])[0] for at in range(0, len(tokens), size)]
        return torch.cat(parts)

    def greedy(self, sequence: int, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest continuation, token by token."""
        logits = self.prefill(sequence, prompt)[-1]
        tokens = [int(logits.argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(self.step([(sequence, tokens[-1:])])[0][0].argmax()))
        return tokens


def _num_leading_ones(counts: list[int]) -> int:
    for index, count in enumerate(counts):
        if count != 1:
            return index
    return len(counts)
