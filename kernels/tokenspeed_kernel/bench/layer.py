# SPDX-License-Identifier: MIT
"""How long a whole decoder layer takes on a GPU: its operations one after another in a CUDA graph, as in a decode step.

    python -m tokenspeed_kernel.bench.layer --tokens 1 8 32 --override gemm.linear=torch_bfloat16

Every token is a row of its own with `--context` tokens in the cache. Layers have weights of their own, so none lie in
a cache, and follow each other, so that kernels overlap as they do in a model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.bench.timing import seconds_per_call
from tokenspeed_kernel.bench.workloads import QWEN3_8B, Model
from tokenspeed_kernel.registry import KernelError, current_platform
from tokenspeed_kernel.registry.selection import override, parse_overrides
from tokenspeed_kernel.rope.heads import HeadNorms, Heads, Slots

QWEN3_06B = Model(1024, 16, 8, 128, 3072, 151936)
MODELS = {"qwen3-8b": QWEN3_8B, "qwen3-0.6b": QWEN3_06B}
_BLOCK_SIZE = 16
_LAYERS = 8


class Layer(NamedTuple):
    """Weights of one layer."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    head_norm: torch.Tensor


class Batch(NamedTuple):
    """What all layers read: activations [T, hidden], the cache of one layer, where rows lie."""

    x: torch.Tensor
    residual: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    slots: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    meta: AttentionMetadata


def make_layer(model: Model, device: str) -> Layer:
    """Random weights on `device`."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5

    heads = model.heads * model.head_dim
    return Layer(
        weight(heads + 2 * model.kv_heads * model.head_dim, model.hidden),
        weight(model.hidden, heads),
        weight(2 * model.inner, model.hidden),
        weight(model.hidden, model.inner),
        torch.ones(model.hidden, device=device, dtype=torch.bfloat16),
        torch.ones(model.head_dim, device=device, dtype=torch.bfloat16),
    )


def make_batch(model: Model, tokens: int, context: int, device: str) -> Batch:
    """`tokens` rows, each of which decodes one token after `context - 1` others."""
    blocks = -(-context // _BLOCK_SIZE)
    tables = torch.arange(tokens * blocks, dtype=torch.int32, device=device).view(tokens, blocks)
    lens = torch.full((tokens,), context, dtype=torch.int32, device=device)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    shape = (tokens * blocks, model.kv_heads, _BLOCK_SIZE, model.head_dim)
    caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    x, residual = (torch.randn(tokens, model.hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    last = tables[:, -1].long() * _BLOCK_SIZE + (context - 1) % _BLOCK_SIZE
    return Batch(
        x,
        residual,
        (caches[0], caches[1]),
        last,
        torch.full((tokens,), context - 1, device=device),
        torch.rand(max(context, 1024), model.head_dim, device=device),
        AttentionMetadata(tables, starts, lens, 1, context, tokens),
    )


def run_layer(model: Model, layer: Layer, batch: Batch) -> torch.Tensor:
    """One layer; returns its output [T, hidden], which nothing reads."""
    size = model.head_dim
    x, residual = api.add_rms_norm(batch.x, batch.residual, layer.norm, 1e-6)
    wide = api.linear(x, layer.qkv).unflatten(1, (-1, size))
    heads = Heads(*wide.split((model.heads, model.kv_heads, model.kv_heads), dim=1))
    norms = HeadNorms(layer.head_norm, layer.head_norm, 1e-6)
    slots = Slots(*batch.caches, batch.slots, None, None)
    q = api.norm_rope_store(heads, norms, batch.positions, batch.cos_sin, slots)
    seen = api.attention(q, *batch.caches, batch.meta, size**-0.5)
    x, residual = api.add_rms_norm(api.linear(seen.flatten(1), layer.out), residual, layer.norm, 1e-6)
    return api.linear(api.linear_silu_and_mul(x, layer.gate_up), layer.down)


def layer_seconds(model: Model, tokens: int, context: int, budget_s: float) -> float:
    """The median time of one layer among `_LAYERS` that follow each other."""
    batch = make_batch(model, tokens, context, "cuda")
    layers = [make_layer(model, "cuda") for _ in range(_LAYERS)]
    calls = [lambda layer=layer: run_layer(model, layer, batch) for layer in layers]
    return seconds_per_call(calls, "cuda", budget_s)


def main(arguments: Sequence[str]) -> int:
    """Parse and run; exit status 2 where there is no GPU or an override is wrong."""
    parser = argparse.ArgumentParser(prog="tokenspeed_kernel.bench.layer", description="time a whole decoder layer")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 256], help="rows of the batch")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each row in the cache")
    parser.add_argument("--budget-s", type=float, default=0.2, help="seconds to spend on each timing")
    parser.add_argument("--override", default="", help="solutions to force, OPERATION=SOLUTION,...")
    options = parser.parse_args(arguments)
    if not current_platform().has_device("cuda"):
        print("error: this machine has no GPU", file=sys.stderr)
        return 2
    try:
        with override(parse_overrides(options.override)):
            for tokens in options.tokens:
                seconds = layer_seconds(MODELS[options.model], tokens, options.context, options.budget_s)
                print(json.dumps({"model": options.model, "tokens": tokens, "us": round(seconds * 1e6, 1)}), flush=True)
    except KernelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
