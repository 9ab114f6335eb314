# SPDX-License-Identifier: MIT
"""What is timed: calls at the shapes that models run, their traffic and arithmetic, and torch's way of doing them.

On CPUs the shapes are SmolLM2-135M's in float32 with its packed formats, on GPUs Qwen3-8B's in bfloat16. `num_bytes`
counts each input read once and each output written once; `num_flops` only products.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.moe.reference import route
from tokenspeed_kernel.moe.routing import Routing
from tokenspeed_kernel.moe.weights import Experts, GatedActivation
from tokenspeed_kernel.numerics.attention_cases import paged_metadata
from tokenspeed_kernel.numerics.case import Case, normal
from tokenspeed_kernel.numerics.cases import expert_matrix
from tokenspeed_kernel.numerics.weight_cases import packed_weight
from tokenspeed_kernel.quant.packed import PackedWeight
from tokenspeed_kernel.quant.reference import dequantize

Args = tuple[Any, ...]


class Mixture(NamedTuple):
    """Shapes of one layer of experts."""

    hidden: int
    experts: int
    top_k: int
    inner: int


class Model(NamedTuple):
    """Shapes of one decoder."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int


SMOL = Model(576, 9, 3, 64, 1536, 49152)
SMOL_EXPERTS = Mixture(576, 8, 2, 1536)
QWEN3_30B_A3B = Mixture(2048, 128, 8, 768)
QWEN3_8B = Model(4096, 32, 8, 128, 12288, 151936)
_BLOCK_SIZE = 16
# Heads of DeepSeek-V2-Lite, or of V3 on one of eight GPUs and on one alone; its latent and rotated key.
_LATENT_HEADS = {False: (16,), True: (16, 128)}
_LATENT, _KEY = 512, 64
# (rows, queries a row, KV tokens a row)
_CPU_BATCHES = ((1, 1, 1024), (16, 1, 512), (1, 512, 512))
_GPU_BATCHES = ((1, 1, 1024), (64, 1, 4096), (1, 8192, 8192), (8, 512, 4096))
# (label, temperature, top_k, top_p)
_FILTERS = (("greedy", 0.0, 0, 1.0), ("no filter", 1.0, 0, 1.0), ("top-k 50, top-p 0.9", 1.0, 50, 0.9))


@dataclass(frozen=True)
class Workload:
    """A call to time. peer: torch's equivalent on the same arguments (prepared by `peer_args`, outside the timing)."""

    op: str
    label: str
    dtype: torch.dtype
    args: Args
    num_bytes: int
    num_flops: int
    peer: Callable[..., object]
    peer_args: Callable[[Args], Args] = field(default=lambda args: args)
    traits: Mapping[str, Hashable] = field(default_factory=dict)

    def case(self) -> Case:
        """The same call as numerics sees it."""
        return Case(self.op, self.label, self.dtype, self.args, traits=self.traits)


def workloads(device: str) -> Iterator[Workload]:
    """Everything that is timed on torch device type `device`, lazily, as CPU tensors."""
    on_gpu = device == "cuda"
    model, dtype = (QWEN3_8B, torch.bfloat16) if on_gpu else (SMOL, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 64, 4096) if on_gpu else (1, 16, 512):
        yield from _layer(model, dtype, tokens, generator)
        yield from _linears(model, dtype, tokens, generator)
    for tokens in (1, 64, 4096) if on_gpu else (1, 16, 512):
        yield from _mixture(QWEN3_30B_A3B if on_gpu else SMOL_EXPERTS, dtype, tokens, generator)

    if on_gpu:
        for tokens in (1, 4, 8, 16):
            yield from _decode_products(model, dtype, tokens, generator)
    yield from _attention(model, dtype, generator, on_gpu)
    yield from _latent_attention(dtype, generator, on_gpu)
    for rows in (1, 64, 256) if on_gpu else (1, 16):
        yield from _sampling(model, rows, generator)


def _size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _layer(model: Model, dtype: torch.dtype, tokens: int, generator: torch.Generator) -> Iterator[Workload]:
    x, residual = (normal(generator, tokens, model.hidden, dtype=dtype) for _ in range(2))
    weight = normal(generator, model.hidden, dtype=dtype)
    norm_traits: dict[str, Hashable] = {"hidden": model.hidden, "weight_dtype": dtype}
    label = f"[{tokens}, {model.hidden}]"
    yield Workload(
        "norm.rms", label, dtype, (x, weight, 1e-6), 2 * _size(x), 0,
        lambda x, w, eps: F.rms_norm(x, w.shape, w, eps), traits=norm_traits,
    )  # fmt: skip
    yield Workload(
        "norm.add_rms", label, dtype, (x, residual, weight, 1e-6), 4 * _size(x), 0, _torch_add_norm, traits=norm_traits
    )
    gated = normal(generator, tokens, 2 * model.inner, dtype=dtype)
    yield Workload(
        "activation.silu_and_mul", f"[{tokens}, 2 x {model.inner}]", dtype, (gated,), _size(gated) * 3 // 2, 0,
        lambda x: F.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :],
    )  # fmt: skip
    q = normal(generator, tokens, model.heads, model.head_dim, dtype=dtype)
    k, v = (normal(generator, tokens, model.kv_heads, model.head_dim, dtype=dtype) for _ in range(2))
    cos_sin = torch.rand(8192, model.head_dim, generator=generator)
    positions = torch.randint(0, 8192, (tokens,), generator=generator)
    heads = f"{tokens} tokens, {model.heads}/{model.kv_heads} heads of {model.head_dim}"
    yield Workload(
        "rope.neox", heads, dtype, (q, k, positions, cos_sin), 2 * _size(q, k) + 4 * tokens * model.head_dim, 0,
        _torch_rope, traits={"head_dim": model.head_dim, "rot_dim": model.head_dim},
    )  # fmt: skip
    caches = [torch.zeros(512, model.kv_heads, _BLOCK_SIZE, model.head_dim, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(512 * _BLOCK_SIZE, generator=generator)[:tokens]
    yield Workload(
        "kvcache.store", heads, dtype, (k, v, *caches, slots, None), 2 * _size(k, v), 0, _torch_store,
        traits={"head_dim": model.head_dim, "block_size": _BLOCK_SIZE, "kv_dtype": dtype},
    )  # fmt: skip


def _linears(model: Model, dtype: torch.dtype, tokens: int, generator: torch.Generator) -> Iterator[Workload]:
    both = 2 * model.inner
    formats = (None, "fp8_b128", "int4_b128") if dtype == torch.bfloat16 else ("q4_1", "q8_0")
    for format in formats:
        for rows, columns in ((both, model.hidden), (model.hidden, model.inner)):
            x = normal(generator, tokens, columns, dtype=dtype)
            weight: Any
            if format is None:
                weight = normal(generator, rows, columns, dtype=dtype, std=columns**-0.5)
                weight_bytes = _size(weight)
            else:
                weight = packed_weight(generator, format, rows, columns)
                weight_bytes = _size(weight.data)
            yield Workload(
                "gemm.linear", f"[{tokens}, {columns}] x {format or 'dense'} [{rows}, {columns}]", dtype,
                (x, weight, None), _size(x) + weight_bytes + tokens * rows * x.element_size(),
                2 * tokens * rows * columns, F.linear, _dense_weight,
            )  # fmt: skip


def _mixture(shape: Mixture, dtype: torch.dtype, tokens: int, generator: torch.Generator) -> Iterator[Workload]:
    """Only the experts that some token chose count as traffic."""
    routing = Routing(shape.experts, shape.top_k)
    logits = normal(generator, tokens, shape.experts, dtype=dtype)
    label = f"[{tokens}, {shape.experts}] choose {shape.top_k}"
    yield Workload(
        "moe.route", label, dtype, (logits, routing, None), _size(logits) + 8 * tokens * shape.top_k, 0, _torch_route,
        traits={"scores": "softmax", "num_experts": shape.experts, "grouped": False},
    )  # fmt: skip
    format = str(dtype).removeprefix("torch.") if dtype == torch.bfloat16 else "q4_1"
    matrices = [
        expert_matrix(generator, format, (shape.experts, rows, columns), columns**-0.5)
        for rows, columns in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    ]
    x = normal(generator, tokens, shape.hidden, dtype=dtype)
    weights, chosen = route(logits, routing, None)
    num_active = int(chosen.unique().numel())
    experts = Experts((matrices[0],), matrices[1], None, None, GatedActivation())
    yield Workload(
        "moe.experts", f"[{tokens}, {shape.hidden}], {shape.top_k} of {shape.experts} {format} x {shape.inner}", dtype,
        (x, weights, chosen, experts),
        2 * _size(x) + sum(_size(matrix.data) for matrix in matrices) * num_active // shape.experts,
        6 * tokens * shape.top_k * shape.hidden * shape.inner, _torch_experts, _dense_experts, {"activation": "silu"},
    )  # fmt: skip


def _decode_products(model: Model, dtype: torch.dtype, tokens: int, generator: torch.Generator) -> Iterator[Workload]:
    """The products of a decode step: those of a layer, the gated one fused, and the vocabulary's."""
    heads, both = model.heads * model.head_dim, (model.heads + 2 * model.kv_heads) * model.head_dim
    for op, rows, columns, peer in (
        ("gemm.linear", both, model.hidden, F.linear),
        ("gemm.linear", model.hidden, heads, F.linear),
        ("gemm.linear", model.hidden, model.inner, F.linear),
        ("gemm.linear_silu_and_mul", 2 * model.inner, model.hidden, _torch_gated),
        ("gemm.logits", model.vocab, model.hidden, _torch_logits),
    ):
        x = normal(generator, tokens, columns, dtype=dtype)
        weight = normal(generator, rows, columns, dtype=dtype, std=columns**-0.5)
        args: Args = (x, weight) if op == "gemm.logits" else (x, weight, None)
        yield Workload(
            op, f"decode [{tokens}, {columns}] x [{rows}, {columns}]", dtype, args, _size(x, weight),
            2 * tokens * rows * columns, peer,
        )  # fmt: skip


def _attention(model: Model, dtype: torch.dtype, generator: torch.Generator, on_gpu: bool) -> Iterator[Workload]:
    for rows, query_len, kv_len in _GPU_BATCHES if on_gpu else _CPU_BATCHES:
        meta, num_blocks = paged_metadata(generator, [(query_len, kv_len)] * rows, _BLOCK_SIZE)
        q = normal(generator, rows * query_len, model.heads, model.head_dim, dtype=dtype)
        shape = (num_blocks, model.kv_heads, _BLOCK_SIZE, model.head_dim)
        caches = [normal(generator, *shape, dtype=dtype) for _ in range(2)]
        pairs = query_len * (2 * kv_len - query_len + 1) // 2
        yield Workload(
            "attention.paged", f"{rows} rows of {query_len} after {kv_len - query_len}", dtype,
            (q, *caches, meta, model.head_dim**-0.5, 0, 0.0, None, None), 2 * _size(q) + _size(*caches),
            4 * rows * pairs * model.heads * model.head_dim, _torch_attention, _dense_attention,
            {
                "head_dim": model.head_dim,
                "group_size": model.heads // model.kv_heads,
                "block_size": _BLOCK_SIZE,
                "windowed": False,
                "kv_dtype": dtype,
                "softcap": False,
                "sinks": False,
            },
        )  # fmt: skip


def _latent_attention(dtype: torch.dtype, generator: torch.Generator, on_gpu: bool) -> Iterator[Workload]:
    for heads in _LATENT_HEADS[on_gpu]:
        for rows, query_len, kv_len in ((1, 1, 4096), (64, 1, 4096), (1, 2048, 2048)) if on_gpu else _CPU_BATCHES:
            meta, num_blocks = paged_metadata(generator, [(query_len, kv_len)] * rows, _BLOCK_SIZE)
            q = normal(generator, rows * query_len, heads, _LATENT + _KEY, dtype=dtype)
            cache = normal(generator, num_blocks, _BLOCK_SIZE, _LATENT + _KEY, dtype=dtype)
            pairs = query_len * (2 * kv_len - query_len + 1) // 2
            yield Workload(
                "attention.mla", f"{rows} rows of {query_len} after {kv_len - query_len}, {heads} heads", dtype,
                (q, cache, meta, 192**-0.5, _LATENT), _size(q) * 17 // 9 + _size(cache),
                2 * rows * pairs * heads * (2 * _LATENT + _KEY), _torch_latent_attention, _dense_latents,
                {"latent_dim": _LATENT, "key_dim": _KEY, "block_size": _BLOCK_SIZE, "kv_dtype": dtype},
            )  # fmt: skip


def _sampling(model: Model, rows: int, generator: torch.Generator) -> Iterator[Workload]:
    logits = normal(generator, rows, model.vocab, std=3.0)
    seeds, positions = torch.arange(rows), torch.full((rows,), 100)
    for label, temperature, top_k, top_p in _FILTERS:
        args = (
            logits,
            torch.full((rows,), temperature),
            torch.full((rows,), top_k, dtype=torch.int32),
            torch.full((rows,), top_p),
            torch.zeros(rows),
            seeds,
            positions,
        )
        peer = _torch_greedy if temperature == 0 else (_torch_filtered if top_k else _torch_multinomial)
        yield Workload(
            "sampling.sample", f"[{rows}, {model.vocab}] {label}", torch.float32, args, _size(logits), 0, peer
        )


def _torch_route(logits: torch.Tensor, routing: Routing, _bias: None) -> object:
    values, chosen = logits.float().softmax(dim=1).topk(routing.top_k)
    return values / values.sum(dim=1, keepdim=True), chosen


def _dense_experts(args: Args) -> Args:
    x, weights, chosen, experts = args
    dense = [
        torch.stack([dequantize(item).to(x.dtype) if isinstance(item, PackedWeight) else item for item in m.experts()])
        for m in (experts.gate_up[0], experts.down)
    ]
    return (x, weights, chosen, *dense)


def _torch_experts(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> object:
    """torch's grouped product on GPUs; elsewhere expert by expert, as models are written in torch."""
    if x.device.type == "cuda":
        return _torch_grouped(x, weights, chosen, gate_up, down)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=1)
        result = F.linear(F.silu(gate) * up, down[expert]) * weights[token, place, None]
        out.index_add_(0, token, result.to(x.dtype))
    return out


def _torch_grouped(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> object:
    order = chosen.flatten().argsort(stable=True)
    every = torch.arange(gate_up.shape[0], device=x.device)
    ends = (chosen.flatten()[None, :] <= every[:, None]).sum(dim=1, dtype=torch.int32)
    token = order // chosen.shape[1]
    gate, up = F.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
    result = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    result = result * weights.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add_(0, token, result)


def _torch_gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> object:
    gate, up = F.linear(x, weight, bias).chunk(2, dim=1)
    return F.silu(gate) * up


def _torch_logits(x: torch.Tensor, weight: torch.Tensor) -> object:
    return F.linear(x, weight).float()


def _torch_add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> object:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def _torch_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> object:
    cos, sin = cos_sin[positions][:, None].to(q.dtype).chunk(2, dim=-1)
    turned = []
    for heads in (q, k):
        low, high = heads.chunk(2, dim=-1)
        turned.append(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))
    return turned


def _torch_store(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, _: None
) -> None:
    block, offset = slots // k_cache.shape[2], slots % k_cache.shape[2]
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v


def _dense_weight(args: Args) -> Args:
    x, weight, bias = args
    return x, dequantize(weight).to(x.dtype) if isinstance(weight, PackedWeight) else weight, bias


def _dense_attention(args: Args) -> Args:
    """Queries, keys and values as [rows, heads, length, D], gathered from the blocks."""
    q, k_cache, v_cache, meta, scale, *_ = args
    return _dense_rows(q, [cache.transpose(1, 2) for cache in (k_cache, v_cache)], meta, scale)


def _dense_latents(args: Args) -> Args:
    """The same: one head's keys, whose first part are the values."""
    q, cache, meta, scale, latent = args
    return _dense_rows(q, [cache[:, :, None], cache[:, :, None, :latent]], meta, scale)


def _dense_rows(q: torch.Tensor, caches: list[torch.Tensor], meta: AttentionMetadata, scale: float) -> Args:
    """caches: [num_blocks, block_size, heads, D]."""
    rows = meta.kv_lens.shape[0]
    queries = q.unflatten(0, (rows, -1)).transpose(1, 2).contiguous()
    dense = [cache[meta.block_tables.long()].flatten(1, 2).transpose(1, 2) for cache in caches]
    length = meta.max_kv_len
    mask = None
    if 1 < meta.max_query_len < length:
        mask = torch.ones(meta.max_query_len, length, dtype=torch.bool, device=q.device)
        mask = mask.tril(length - meta.max_query_len)
    return (queries, *(part[:, :, :length].contiguous() for part in dense), mask, scale)


def _torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float) -> object:
    causal = q.shape[2] > 1 and mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)


def _torch_latent_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float) -> object:
    """Heads are rows of one product; torch's own attention would first repeat the keys for each of them."""
    scores = torch.matmul(q.flatten(1, 2) * scale, k[:, 0].transpose(1, 2)).unflatten(1, q.shape[1:3])
    if mask is None and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1).flatten(1, 2), v[:, 0]).unflatten(1, q.shape[1:3])


def _torch_greedy(logits: torch.Tensor, *_: torch.Tensor) -> object:
    return logits.argmax(dim=1)


def _torch_multinomial(logits: torch.Tensor, *_: torch.Tensor) -> object:
    noise = torch.empty_like(logits).exponential_()
    return (logits.softmax(dim=1) / noise).argmax(dim=1)


def _torch_filtered(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, *_: torch.Tensor
) -> object:
    values, ids = logits.sort(dim=1, descending=True)
    values = values.masked_fill(torch.arange(values.shape[1], device=values.device) >= top_k[:, None], float("-inf"))
    weights = values.softmax(dim=1)
    weights = weights.masked_fill(weights.cumsum(dim=1) - weights >= top_p[:, None], 0.0)
    picked = (weights / torch.empty_like(weights).exponential_()).argmax(dim=1)
    return ids.gather(1, picked[:, None])
