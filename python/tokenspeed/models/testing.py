# SPDX-License-Identifier: MIT
"""A model driven by hand in tests: paged caches with scattered blocks, rows of any length, no engine.

`PagedSequences` does what scheduler and inputs do in the engine, in the plainest way, so that a test can put any mix
of decode rows and prefill chunks into one step and look at all the logits. `logits_of_two_ranks` runs this module as
two processes that share a model over gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import ModelSource
from tokenspeed.layers import AttentionMetadata, ForwardBatch
from tokenspeed.layers.cache import total_block_bytes
from tokenspeed.models.loading import load_model
from tokenspeed.models.model import Model
from tokenspeed.parallel import Group

PROMPT = list(range(3, 17))
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "attention_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen3ForCausalLM"]},
    "tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "gemma": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "query_pre_attn_scalar": 16},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
    "sinks": {"architectures": ["GptOssForCausalLM"], **OSS},
    "latent": LATENT,
}


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


def logits_of_two_ranks(folder: Path, prompt: Sequence[int], next_token: int) -> list[tuple[int, torch.Tensor]]:
    """What each of two ranks has: bytes of a block of 16 tokens, and the logits after each token.

    The model lies in `folder`; the prompt is computed in chunks of three, the next token as a decode step.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    tokens = [str(token) for token in (*prompt, next_token)]
    command = [sys.executable, "-m", "tokenspeed.models.testing", str(folder)]
    ranks = [subprocess.Popen([*command, str(rank), *tokens], env=environment) for rank in range(2)]
    try:
        exits = [process.wait(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert exits == [0, 0]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def _run_rank(folder: Path, rank: int, tokens: list[int]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    source = ModelSource("folder", folder, "test")
    model = load_model(source, load_model_config(source), "cpu", torch.float32, group=Group(rank, 2))
    sequences = PagedSequences(model, 1, len(tokens))
    logits = torch.cat([sequences.prefill(0, tokens[:-1], chunk=3), sequences.step([(0, tokens[-1:])])[0]])
    torch.save((total_block_bytes(model.kv_cache(16)), logits), folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]), [int(token) for token in sys.argv[3:]])


def logits(model: Any) -> torch.Tensor:
    """Of the last token of PROMPT, alone."""
    return PagedSequences(model, 1, 16).prefill(0, PROMPT)
