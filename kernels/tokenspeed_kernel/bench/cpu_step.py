# SPDX-License-Identifier: MIT
"""Times whole forward steps of a Llama-shaped model with random packed weights on the CPU, and its parts beside torch.

    python -m tokenspeed_kernel.bench.cpu_step [--threads N] [--context TOKENS] [--ops]

The default shape is SmolLM2-135M: q4_1 layers, q8_0 table. A step is what the engine launches: embedding, 30 layers,
final norm, logits of the last positions, greedy tokens. torch runs the same step on dequantised float32 weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tokenspeed_kernel import _cpu, api
from tokenspeed_kernel.quant.packed import BLOCK_FORMATS, PackedWeight
from tokenspeed_kernel.quant.reference import dequantize


@dataclass(frozen=True)
class Shape:
    """Sizes of the model under test."""

    layers: int = 30
    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    ffn: int = 1536
    vocab: int = 49152
    block_size: int = 16


def random_weight(format: str, rows: int, columns: int) -> PackedWeight:
    """Random bits with scales that keep weights near 1 / sqrt(columns)."""
    values, size = BLOCK_FORMATS[format]
    blocks = torch.randint(0, 256, (rows, columns // values, size), dtype=torch.uint8)
    levels = {"q4_1": 8.0, "q8_0": 128.0}[format]
    scale = torch.rand(rows, columns // values, 1) * columns**-0.5 / levels + 1e-4
    blocks[..., :2] = scale.half().view(torch.uint8)
    if format == "q4_1":
        blocks[..., 2:4] = (-7.5 * scale).half().view(torch.uint8)
    return PackedWeight(blocks.reshape(rows, -1), format, (rows, columns))


class Step:
    """One model and its cache; `run` is one forward. `dense` picks torch on float32 weights instead of our kernels."""

    def __init__(self, shape: Shape, rows: int, query_len: int, context: int, dense: bool) -> None:
        self.shape, self.dense, self.rows, self.query_len = shape, dense, rows, query_len
        torch.manual_seed(0)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.layers = [
            [
                self._weight("q4_1", width, shape.hidden),
                self._weight("q4_1", shape.hidden, shape.heads * shape.head_dim),
                self._weight("q4_1", 2 * shape.ffn, shape.hidden),
                self._weight("q4_1", shape.hidden, shape.ffn),
            ]
            for _ in range(shape.layers)
        ]
        self.table = self._weight("q8_0", shape.vocab, shape.hidden)
        self.norm = torch.ones(shape.hidden)
        per_row = -(-context // shape.block_size)
        cache = (rows * per_row + 1, shape.kv_heads, shape.block_size, shape.head_dim)
        self.caches = [(torch.randn(cache), torch.randn(cache)) for _ in range(shape.layers)]
        self.cos_sin = torch.randn(context, shape.head_dim)
        tables = 1 + torch.arange(rows * per_row, dtype=torch.int32).reshape(rows, per_row)
        at = torch.arange(context - query_len, context)
        slots = tables[:, at // shape.block_size].long() * shape.block_size + at % shape.block_size
        self.positions, self.slots = at.repeat(rows), slots.flatten()
        starts = torch.arange(rows + 1, dtype=torch.int32) * query_len
        lens = torch.full((rows,), context, dtype=torch.int32)
        self.meta = api.AttentionMetadata(tables, starts, lens, query_len, context, rows if query_len == 1 else 0)
        self.last = starts[1:].long() - 1
        zeros, wide = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
        self.greedy = (zeros, zeros.int(), zeros, zeros, wide, wide)
        self.tokens = torch.randint(0, shape.vocab, (rows * query_len,))

    def _weight(self, format: str, rows: int, columns: int) -> Any:
        weight = random_weight(format, rows, columns)
        return dequantize(weight) if self.dense else api.prepare_weight(weight, "cpu")

    def run(self) -> torch.Tensor:
        """Greedy tokens of the last positions."""
        return self._run_torch() if self.dense else self._run_ours()

    def _run_ours(self) -> torch.Tensor:
        s, norm = self.shape, self.norm
        count = self.tokens.shape[0]
        residual = api.embedding(self.tokens, self.table, torch.float32)
        x = api.rms_norm(residual, norm, 1e-5)
        for (qkv_weight, out_weight, up_weight, down_weight), (k_cache, v_cache) in zip(
            self.layers, self.caches, strict=True
        ):
            qkv = api.linear(x, qkv_weight).view(count, -1, s.head_dim)
            q, k, v = qkv[:, : s.heads], qkv[:, s.heads : s.heads + s.kv_heads], qkv[:, s.heads + s.kv_heads :]
            api.rope(q, k, self.positions, self.cos_sin)
            api.store_kv(k, v, k_cache, v_cache, self.slots)
            mixed = api.attention(q, k_cache, v_cache, self.meta, s.head_dim**-0.5)
            x, residual = api.add_rms_norm(api.linear(mixed.view(count, -1), out_weight), residual, norm, 1e-5)
            x = api.linear(api.silu_and_mul(api.linear(x, up_weight)), down_weight)
            x, residual = api.add_rms_norm(x, residual, norm, 1e-5)
        logits = api.linear(x[self.last] if self.query_len > 1 else x, self.table)
        return api.sample(logits, *self.greedy)

    def _run_torch(self) -> torch.Tensor:
        s, rows = self.shape, self.rows
        count = self.tokens.shape[0]
        half = s.head_dim // 2
        cos, sin = self.cos_sin[self.positions][:, None].split(half, dim=-1)
        residual = F.embedding(self.tokens, self.table)
        for (qkv_weight, out_weight, up_weight, down_weight), (k_cache, v_cache) in zip(
            self.layers, self.caches, strict=True
        ):
            x = F.rms_norm(residual, (s.hidden,), self.norm, 1e-5)
            qkv = F.linear(x, qkv_weight).view(count, -1, s.head_dim)
            low, high = qkv[:, : s.heads + s.kv_heads].split(half, dim=-1)
            turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
            q = turned[:, : s.heads].view(rows, self.query_len, s.heads, s.head_dim).transpose(1, 2)
            keys = (
                k_cache[1:].view(rows, -1, *k_cache.shape[1:]).transpose(1, 2).reshape(rows, s.kv_heads, -1, s.head_dim)
            )
            values = v_cache[1:].view(rows, -1, *v_cache.shape[1:]).transpose(1, 2).reshape(keys.shape)
            mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=self.query_len > 1, enable_gqa=True)
            residual = residual + F.linear(mixed.transpose(1, 2).reshape(count, -1), out_weight)
            gate, up = F.linear(F.rms_norm(residual, (s.hidden,), self.norm, 1e-5), up_weight).chunk(2, dim=-1)
            residual = residual + F.linear(F.silu(gate) * up, down_weight)
        x = F.rms_norm(residual, (s.hidden,), self.norm, 1e-5)
        return F.linear(x[self.last], self.table).argmax(dim=1)


def seconds(run: Callable[[], object], budget_s: float) -> float:
    """The lower quartile of the times of repeated calls: other processes only ever add."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4]


def main() -> None:
    """Print one line a step: batch, tokens, milliseconds, tokens/s, and torch beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=_cpu.num_threads())
    parser.add_argument("--context", type=int, default=256, help="KV tokens of a decode row")
    parser.add_argument("--no-torch", action="store_true", help="time only our kernels")
    args = parser.parse_args()
    _cpu.set_num_threads(args.threads)
    print(f"isa {_cpu.isa()}, {args.threads} threads, context {args.context}")
    for name, rows, query_len, context in (
        ("decode", 1, 1, args.context),
        ("decode", 4, 1, args.context),
        ("decode", 16, 1, args.context),
        ("prefill", 1, 512, 512),
        ("prefill", 1, 2048, 2048),
    ):
        # Threads of torch's own pool spin after each of its operations, on the cores that our kernels want.
        torch.set_num_threads(1)
        ours = seconds(Step(Shape(), rows, query_len, context, dense=False).run, 2.0)
        line = f"{name} {rows:3d} x {query_len:4d}: {ours * 1e3:8.2f} ms {rows * query_len / ours:8.0f} tokens/s"
        if not args.no_torch:
            torch.set_num_threads(args.threads)
            theirs = seconds(Step(Shape(), rows, query_len, context, dense=True).run, 2.0)
            line += f"   torch {theirs * 1e3:8.2f} ms, ratio {theirs / ours:5.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
