# SPDX-License-Identifier: MIT
"""Random calls of every operation: small, odd-sized, seeded, the same on every machine.

A `Case` holds the arguments of one api call as CPU tensors in the dtype under test. Sizes are chosen to reach the
edges of tiles (1, odd, just past a power of two) while the Triton interpreter still runs them in a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from tokenspeed_kernel.moe.routing import Routing
from tokenspeed_kernel.moe.weights import ExpertMatrix, Experts, GatedActivation
from tokenspeed_kernel.numerics import attention_cases, sampling_cases, weight_cases
from tokenspeed_kernel.numerics.attention_cases import strided_tokens
from tokenspeed_kernel.numerics.case import Case, Dtype, normal
from tokenspeed_kernel.numerics.weight_cases import packed_weight, small_caches
from tokenspeed_kernel.quant.packed import (
    BLOCK_FORMATS,
    BLOCKS_LAYOUT,
    ROWS_LAYOUT,
)
from tokenspeed_kernel.rope.heads import HeadNorms, Heads, Slots

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def cases(op: str, dtype: Dtype, seed: int = 0) -> list[Case]:
    """The random calls of `op` with activations of `dtype`; empty where the operation does not take it."""
    return [] if op not in _MAKERS else list(_MAKERS[op](dtype, torch.Generator().manual_seed(seed)))


def covered_ops() -> list[str]:
    """Operations that have cases."""
    return sorted(_MAKERS)


def _linear_heads(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for tokens, heads, columns, rows in ((1, 2, 64, 32), (7, 5, 96, 48), (3, 3, 40, 16), (2, 3, 40, 24)):
        x = normal(generator, tokens, heads, columns + 16, dtype=dtype)[..., :columns]
        out = normal(generator, tokens, heads, rows + 8, dtype=dtype)[..., 8:]
        weight = normal(generator, heads * rows, columns, dtype=dtype, std=columns**-0.5)
        label = f"{tokens} tokens, {heads} heads, [{rows}, {columns}]"
        traits = {"rows_per_head": rows}
        yield Case("gemm.heads", label, dtype, (x, weight, out), mutated=(2,), traits=traits)


_NORM_SHAPES = ((1, 64), (3, 576), (5, 1000), (2, 4096))


def _rms_norm(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for tokens, hidden in _NORM_SHAPES:
        x, weight = normal(generator, tokens, hidden, dtype=dtype), normal(generator, hidden, dtype=dtype)
        yield Case("norm.rms", f"[{tokens}, {hidden}]", dtype, (x, weight, 1e-5), traits=_norm_traits(weight))
    heads = strided_tokens(normal(generator, 4, 6, 64, dtype=dtype))
    weight = normal(generator, 64)
    yield Case("norm.rms", "heads of strided tokens", dtype, (heads, weight, 1e-6), traits=_norm_traits(weight))


def _norm_traits(weight: torch.Tensor) -> dict[str, Hashable]:
    return {"hidden": weight.shape[0], "weight_dtype": weight.dtype}


def _add_rms_norm(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for tokens, hidden in (*_NORM_SHAPES, (3, 8192), (2, 16384)):
        x, residual = (normal(generator, tokens, hidden, dtype=dtype) for _ in range(2))
        weight = normal(generator, hidden, dtype=dtype)
        args = (x, residual, weight, 1e-5)
        yield Case("norm.add_rms", f"[{tokens}, {hidden}]", dtype, args, traits=_norm_traits(weight))


def _silu_and_mul(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for tokens, inner in ((1, 64), (3, 1536), (5, 1000)):
        x = normal(generator, tokens, 2 * inner, dtype=dtype, std=3.0)
        yield Case("activation.silu_and_mul", f"[{tokens}, 2 x {inner}]", dtype, (x,))


def _rope_of(op: str) -> Callable[[Dtype, torch.Generator], Iterator[Case]]:
    return lambda dtype, generator: _rope(op, dtype, generator)


def _rope(op: str, dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for tokens, heads, kv_heads, head_dim, rot_dim in ((1, 4, 2, 64, 64), (5, 9, 3, 64, 64), (3, 2, 1, 128, 32)):
        angles = torch.rand(50, rot_dim // 2, generator=generator) * 6.3
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        positions = torch.randint(0, 50, (tokens,), generator=generator)
        q, k = (normal(generator, tokens, count, head_dim, dtype=dtype) for count in (heads, kv_heads))
        traits = {"head_dim": head_dim, "rot_dim": rot_dim}
        label = f"{tokens} tokens, {heads}/{kv_heads} heads of {head_dim}, {rot_dim} rotated"
        if heads == 9:
            q, k = strided_tokens(q), strided_tokens(k)
        yield Case(op, label, dtype, (q, k, positions, cos_sin), mutated=(0, 1), traits=traits)
    # The rotated part of each head lies after a part that is not rotated, as in multi-head latent attention.
    q, k = normal(generator, 4, 5, 96, dtype=dtype)[..., 64:], normal(generator, 4, 1, 48, dtype=dtype)[..., 16:]
    args = (q, k, torch.randint(0, 50, (4,), generator=generator), torch.rand(50, 32, generator=generator))
    traits = {"head_dim": 32, "rot_dim": 32}
    yield Case(op, "tails of heads", dtype, args, mutated=(0, 1), traits=traits)


def _norm_rope_store(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for tokens, heads, kv_heads, head_dim, rot_dim, norm_dtype in (
        (1, 4, 2, 128, 128, dtype),
        (5, 3, 1, 64, 64, torch.float32),
        (7, 4, 4, 128, 128, None),
        (3, 2, 1, 256, 256, dtype),
        (3, 2, 1, 128, 32, dtype),
    ):
        wide = normal(generator, tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
        parts = Heads(*wide.split((heads, kv_heads, kv_heads), dim=1))
        norms = None
        if norm_dtype is not None:
            q_weight, k_weight = (normal(generator, head_dim, dtype=norm_dtype) for _ in range(2))
            norms = HeadNorms(q_weight, k_weight, 1e-6)
        angles = torch.rand(50, rot_dim // 2, generator=generator) * 6.3
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        positions = torch.randint(0, 50, (tokens,), generator=generator)
        k_cache, v_cache = (normal(generator, 4, kv_heads, 16, head_dim, dtype=dtype) for _ in range(2))
        slots = Slots(k_cache, v_cache, torch.randperm(64, generator=generator)[:tokens], None, None)
        traits = {
            "head_dim": head_dim,
            "rot_dim": rot_dim,
            "normed": norms is not None,
            "block_size": 16,
            "kv_dtype": dtype,
        }
        label = f"{tokens} tokens, {heads}/{kv_heads} heads of {head_dim}, {rot_dim} rotated, norms {norm_dtype}"
        args = (parts, norms, positions, cos_sin, slots)
        yield Case("rope.norm_store", label, dtype, args, mutated=(4,), traits=traits)


def _store_kv(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for tokens, kv_heads, head_dim, block_size in ((1, 3, 64, 16), (7, 2, 128, 32), (5, 1, 80, 16)):
        caches = [normal(generator, 4, kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2)]
        k, v = (strided_tokens(normal(generator, tokens, kv_heads, head_dim, dtype=dtype)) for _ in range(2))
        slots = torch.randperm(4 * block_size, generator=generator)[:tokens]
        traits = {"head_dim": head_dim, "block_size": block_size, "kv_dtype": dtype}
        label = f"{tokens} tokens, {kv_heads} heads of {head_dim}"
        yield Case("kvcache.store", label, dtype, (k, v, *caches, slots, None), mutated=(2, 3), traits=traits)
        # Values that fp8 holds as subnormals, in between, and not at all.
        k, v = k * torch.tensor(0.003), v * torch.tensor(150.0)
        for kv_dtype, scales in small_caches(generator, caches[0].shape[:3]):
            small = [cache.to(kv_dtype) for cache in caches]
            yield Case(
                "kvcache.store",
                f"{label}, {kv_dtype} {'scaled' if scales else 'cache'}",
                dtype,
                (k, v, *small, slots, scales),
                mutated=(2, 3, 5),
                traits=traits | {"kv_dtype": kv_dtype},
            )


def _store_latent(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for tokens, latent_dim, key_dim, block_size in ((1, 32, 16, 16), (7, 512, 64, 32), (5, 40, 8, 8)):
        cache = normal(generator, 4, block_size, latent_dim + key_dim, dtype=dtype)
        latent = normal(generator, tokens, latent_dim, dtype=dtype)
        key = normal(generator, tokens, key_dim + 8, dtype=dtype)[:, 8:]
        slots = torch.randperm(4 * block_size, generator=generator)[:tokens]
        label = f"{tokens} tokens of {latent_dim} + {key_dim}"
        args = (latent, key, cache, slots)
        yield Case("kvcache.store_latent", label, dtype, args, mutated=(2,), traits={"kv_dtype": dtype})
        if tokens != 7:
            continue
        small = cache.to(torch.float8_e4m3fn)
        # Values that fp8 holds as subnormals, and not at all.
        args = (latent * torch.tensor(0.003), key * torch.tensor(300.0), small, slots)
        traits = {"kv_dtype": small.dtype}
        yield Case("kvcache.store_latent", f"{label}, fp8 cache", dtype, args, mutated=(2,), traits=traits)


def _copy_blocks(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    caches = [normal(generator, 6, 2, 16, 64) for _ in range(3)]
    caches = (
        [(cache * 9).to(torch.uint8) for cache in caches] if dtype == torch.uint8 else [c.to(dtype) for c in caches]
    )
    pairs = torch.tensor([[1, 4], [3, 0], [1, 5]], dtype=torch.int32)
    yield Case("kvcache.copy_blocks", "three pairs, three caches", dtype, (caches, pairs), mutated=(0,))


def _move_blocks(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    def noise(rows: int, width: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, width), generator=generator, dtype=dtype)

    widths = (16, 24 * 64, 8 * 2100)  # scales, a small cache, one of more than a piece
    pairs = torch.tensor([[1, 4], [3, 0], [5, 2]], dtype=torch.int32)
    for to_packed, written in ((True, 1), (False, 0)):
        caches, packed = [noise(6, width) for width in widths], noise(5, sum(widths))
        label = "three caches to rows" if to_packed else "three caches from rows"
        yield Case("kvcache.move_blocks", label, dtype, (caches, packed, pairs, to_packed), mutated=(written,))


ROUTINGS = {
    "softmax": Routing(8, 2),
    "softmax, kept sums": Routing(60, 4, renormalize=False, scale=1.5),
    "all experts": Routing(5, 5),
    "sigmoid": Routing(17, 3, scores="sigmoid", scale=2.5),
    "best groups (DeepSeek-V2)": Routing(32, 6, renormalize=False, scale=16.0, num_groups=8, top_groups=3),
    "best pairs of groups (DeepSeek-V3)": Routing(
        64, 8, scores="sigmoid", scale=2.5, num_groups=8, top_groups=4, group_score="best_two"
    ),
}


def _route(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for label, routing in ROUTINGS.items():
        for tokens in (1, 7):
            logits = normal(generator, tokens, routing.num_experts, dtype=dtype, std=2.0)
            logits[0, 1] = logits[0].max()  # equal largest logits
            bias = normal(generator, routing.num_experts, std=0.3) if routing.scores == "sigmoid" else None
            traits = {"scores": routing.scores, "num_experts": routing.num_experts, "grouped": routing.grouped}
            yield Case("moe.route", f"{label}, {tokens} tokens", dtype, (logits, routing, bias), traits=traits)


def expert_matrix(generator: torch.Generator, format: str, shape: tuple[int, int, int], std: float) -> ExpertMatrix:
    """Random experts [E, N, K], dense of the dtype that `format` names or GGUF blocks."""
    num_experts, rows, columns = shape
    if format in BLOCK_FORMATS:
        data = packed_weight(generator, format, num_experts * rows, columns).data
        return ExpertMatrix(data.view(num_experts, rows, -1), format, shape, BLOCKS_LAYOUT)
    return ExpertMatrix(normal(generator, *shape, dtype=getattr(torch, format), std=std), format, shape, ROWS_LAYOUT)


# (label, tokens, experts, chosen, hidden, inner, formats of gate and up and of down, biases, activation)
_EXPERTS: tuple[tuple[Any, ...], ...] = (
    ("one token", 1, 4, 2, 64, 48, None, False, GatedActivation()),
    ("tokens for every expert", 21, 4, 2, 96, 33, None, False, GatedActivation()),
    ("more experts than pairs", 3, 64, 2, 32, 80, None, False, GatedActivation()),
    ("clamped, with biases", 9, 5, 3, 48, 64, None, True, GatedActivation("swiglu_clamped", 1.702, 1.5)),
    ("packed", 6, 3, 2, 256, 256, (("q4_k",), "q6_k"), False, GatedActivation()),
    ("gate and up packed apart", 6, 3, 2, 256, 256, (("q4_0", "q8_0"), "q5_1"), False, GatedActivation()),
)


def _experts(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for label, tokens, num_experts, top_k, hidden, inner, formats, biased, activation in _EXPERTS:
        dense = str(dtype).removeprefix("torch.")
        gate_up_formats, down_format = formats or ((dense,), dense)
        rows = 2 * inner // len(gate_up_formats)
        experts = Experts(
            tuple(
                expert_matrix(generator, format, (num_experts, rows, hidden), hidden**-0.5)
                for format in gate_up_formats
            ),
            expert_matrix(generator, down_format, (num_experts, hidden, inner), inner**-0.5),
            normal(generator, num_experts, 2 * inner, dtype=dtype) if biased else None,
            normal(generator, num_experts, hidden, dtype=dtype) if biased else None,
            activation,
        )
        x = normal(generator, tokens, hidden, dtype=dtype, std=0.5 if formats else 1.0)
        chosen = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)]).int()
        weights = torch.rand(tokens, top_k, generator=generator)
        yield Case("moe.experts", label, dtype, (x, weights, chosen, experts), traits={"activation": activation.kind})


def _step_tables(generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(6 * 5, generator=generator).int().view(6, 5)


def _update_tables(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    if dtype == torch.int32:
        cells = torch.randperm(30, generator=generator)
        updates = torch.stack([cells // 5, cells % 5, cells + 100], dim=1).int()
        for count in (0, 1, 29):
            args = (_step_tables(generator), updates, torch.tensor([count], dtype=torch.int32))
            yield Case("step.update_tables", f"{count} of 30 updates", dtype, args, mutated=(0,))


def _decode_inputs(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    if dtype == torch.int32:
        for slots, lengths in (((3,), (0,)), ((4, 0, 2, 5, 5), (15, 16, 79, 0, 0))):
            tokens = torch.randint(0, 9000, (6,), generator=generator)
            args = (torch.tensor([slots, lengths], dtype=torch.int32), tokens, _step_tables(generator), 16)
            yield Case("step.decode_inputs", f"{len(slots)} rows", dtype, args)


def _receive(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    if dtype == torch.int32:
        for num_rows, count in ((1, 0), (3, 5), (90, 30)):
            cells = torch.randperm(30, generator=generator)[:count]
            updates = torch.stack([cells // 5, cells % 5, cells + 100], dim=1).int()
            ring = torch.randint(0, 4, (3, 4 + 2 * num_rows + 3 * 31 + 1), generator=generator, dtype=torch.int32)
            ring[1, 0] = count
            ring[1, 4 + 2 * num_rows :][: updates.numel()] = updates.flatten()
            args = (ring, torch.tensor([1], dtype=torch.int32), _step_tables(generator), num_rows)
            yield Case("step.receive", f"{num_rows} rows, {count} updates", dtype, args, mutated=(2,))


def _publish(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    if dtype == torch.int32:
        for num_rows, turn in ((1, 0), (150, 2)):
            slots = torch.randperm(160, generator=generator)[:num_rows]
            tokens = torch.randint(0, 9000, (num_rows,), generator=generator).int()
            ring, at = torch.full((3, 151), -1, dtype=torch.int32), torch.tensor([turn], dtype=torch.int32)
            args = (tokens, slots, torch.arange(160), ring, at)
            yield Case("step.publish", f"{num_rows} rows, turn {turn}", dtype, args, mutated=(2, 3, 4))


def _keep_tokens(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    if dtype == torch.int32:
        for num_rows in (1, 150):
            slots = torch.randperm(160, generator=generator)[:num_rows]
            tokens = torch.randint(0, 9000, (num_rows,), generator=generator).int()
            args = (tokens, slots, torch.arange(160))
            yield Case("step.keep_tokens", f"{num_rows} rows", dtype, args, mutated=(2,))


_MAKERS: dict[str, Callable[[Dtype, torch.Generator], Iterator[Case]]] = {
    "attention.paged": attention_cases.paged,
    "attention.mla": attention_cases.latent,
    "gemm.heads": _linear_heads,
    "gemm.linear": weight_cases.linear,
    "gemm.linear_silu_and_mul": weight_cases.linear_silu,
    "gemm.linear_add": weight_cases.linear_add,
    "gemm.logits": weight_cases.logits,
    "gemm.embedding": weight_cases.embedding,
    "norm.rms": _rms_norm,
    "norm.add_rms": _add_rms_norm,
    "activation.silu_and_mul": _silu_and_mul,
    "rope.neox": _rope_of("rope.neox"),
    "rope.gptj": _rope_of("rope.gptj"),
    "rope.norm_store": _norm_rope_store,
    "kvcache.store": _store_kv,
    "kvcache.store_latent": _store_latent,
    "kvcache.copy_blocks": _copy_blocks,
    "kvcache.move_blocks": _move_blocks,
    "moe.route": _route,
    "moe.experts": _experts,
    "sampling.penalties": sampling_cases.penalties,
    "sampling.token_mask": sampling_cases.token_mask,
    "sampling.sample": sampling_cases.sample,
    "sampling.logprobs": sampling_cases.logprobs,
    "step.update_tables": _update_tables,
    "step.decode_inputs": _decode_inputs,
    "step.keep_tokens": _keep_tokens,
    "step.receive": _receive,
    "step.publish": _publish,
}
