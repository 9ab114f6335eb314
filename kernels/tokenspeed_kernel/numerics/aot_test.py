# SPDX-License-Identifier: MIT
"""Every Triton kernel compiles to machine code for the GPUs we name, on a machine without one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernel.activation.triton_silu import silu_and_mul_kernel
from tokenspeed_kernel.attention.triton_mla import latent_kernel
from tokenspeed_kernel.attention.triton_paged import decode_kernel, merge_kernel, num_splits, prefill_kernel
from tokenspeed_kernel.gemm.triton_invariant import Tile, invariant_linear_kernel, tile_for
from tokenspeed_kernel.gemm.triton_scaled import scaled_embedding_kernel, scaled_linear_kernel
from tokenspeed_kernel.kvcache.triton_move import move_blocks_kernel
from tokenspeed_kernel.kvcache.triton_store import store_kv_kernel, store_latent_kernel
from tokenspeed_kernel.moe.triton_experts import (
    aligned_parts,
    count_kernel,
    down_kernel,
    gate_up_kernel,
    place_kernel,
    sum_kernel,
    tile_rows,
)
from tokenspeed_kernel.moe.triton_route import route_kernel
from tokenspeed_kernel.norm.triton_norm import rms_norm_kernel
from tokenspeed_kernel.rope.triton_rope import rope_kernel
from tokenspeed_kernel.sampling.triton_mask import token_mask_kernel
from tokenspeed_kernel.sampling.triton_penalties import penalties_kernel
from tokenspeed_kernel.sampling.triton_sample import sample_kernel
from tokenspeed_kernel.step.triton_step import (
    decode_inputs_kernel,
    keep_tokens_kernel,
    publish_kernel,
    receive_kernel,
    update_tables_kernel,
)


class Build(NamedTuple):
    """A kernel, the types of its pointer and float arguments (the others are i32), its constants."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3


_TILES = {
    "CACHE": "floats",
    "GROUP": 4,
    "BLOCK_SIZE": 16,
    "HEAD_DIM": 128,
    "TILE_D": 128,
    "TILE_N": 64,
    "PRECISION": "tf32",
    "WINDOW": 0,
}
_TILES |= {"CAP": 0.0, "SINKS": False}
_PAGED = {
    **dict.fromkeys(("q", "k_cache", "v_cache", "k_scales", "v_scales", "out"), "*bf16"),
    **dict.fromkeys(("block_tables", "kv_lens"), "*i32"),
    "sinks": "*fp32",
    "scale": "fp32",
}
_LATENT = {
    **dict.fromkeys(("q", "cache", "out"), "*bf16"),
    **dict.fromkeys(("block_tables", "kv_lens", "query_start"), "*i32"),
    "sinks": "*fp32",
    "scale": "fp32",
}
_LATENT_TILES = {
    "FP8": False,
    "BLOCK_SIZE": 64,
    "LATENT": 512,
    "KEY": 64,
    "TILE_L": 512,
    "TILE_K": 64,
    "TILE_N": 32,
    "PRECISION": "tf32",
    "ONE_LOOP": False,
}
_SMALL_CACHE = {
    **dict.fromkeys(("k_cache", "v_cache"), "*u8"),
    **dict.fromkeys(("k_scales", "v_scales"), "*fp32"),
}
_SCALED = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **dict.fromkeys(("values", "zeros"), "*u8"),
    "scales": "*fp32",
}
_SCALED_TILES = {"BIASED": True, "BLOCK": 128, "TILE_T": 16, "TILE_N": 32, "PRECISION": "tf32"}


def _invariant(num_tokens: int, num_outputs: int, type: str, dtype: torch.dtype) -> Build:
    tile: Tile = tile_for(num_tokens, num_outputs, dtype)
    constants = {"BIASED": True, "WHOLE_K": True, "IN_A_ROW": 8, "PRECISION": "ieee" if type == "fp32" else "tf32"}
    constants |= {"TILE_T": tile.tokens, "TILE_N": tile.outputs, "TILE_K": tile.inputs}
    types = dict.fromkeys(("x", "weight", "bias", "out"), f"*{type}")
    return Build(invariant_linear_kernel, types, constants, tile.num_warps, tile.num_stages)


_SAMPLE = {
    **dict.fromkeys(("logits", "temperatures", "top_ps", "min_ps"), "*fp32"),
    **dict.fromkeys(("top_ks", "out"), "*i32"),
    **dict.fromkeys(("seeds", "positions"), "*i64"),
}
_NORM = {**dict.fromkeys(("x", "residual", "weight", "out"), "*bf16"), "eps": "fp32"}
_PENALTIES = {
    **dict.fromkeys(("logits", "repetition", "frequency", "presence"), "*fp32"),
    "slots": "*i64",
    "output_counts": "*i32",
    "prompt_mask": "*u8",
}
_SORT = dict.fromkeys(("chosen", "counts", "order", "tiles", "num_tiles"), "*i32")
_EXPERTS = {
    **dict.fromkeys(("x", "weight", "bias", "out"), "*bf16"),
    **dict.fromkeys(("order", "tiles", "num_tiles"), "*i32"),
    **dict.fromkeys(("alpha", "limit"), "fp32"),
    "stride_expert": "i64",
    "weights": "*fp32",
}
_GROUPED = {"WHOLE_K": True, "TILE_K": 64, "PRECISION": "tf32"}
_ROUTE = {
    **dict.fromkeys(("logits", "bias", "weights"), "*fp32"),
    "experts": "*i32",
    "scale": "fp32",
}

BUILDS = {
    "route, best pairs of groups": Build(
        route_kernel,
        _ROUTE,
        {"NUM_EXPERTS": 256, "TOP_K": 8, "SIGMOID": True, "BIASED": True, "RENORMALIZE": True}
        | {"NUM_GROUPS": 8, "TOP_GROUPS": 4, "BEST_TWO": True, "TILE_E": 256, "TILE_K": 8},
        1,
    ),
    "route, softmax": Build(
        route_kernel,
        _ROUTE,
        {"NUM_EXPERTS": 128, "TOP_K": 8, "SIGMOID": False, "BIASED": False, "RENORMALIZE": True}
        | {"NUM_GROUPS": 1, "TOP_GROUPS": 1, "BEST_TWO": False, "TILE_E": 128, "TILE_K": 8},
        1,
    ),
    "count pairs": Build(count_kernel, _SORT, {"SCAN": 1024}),
    "place pairs": Build(place_kernel, _SORT, {"TILE_M": 64, "TILE_E": 128, "SCAN": 1024}),
    "experts' gate and up, decode": Build(
        gate_up_kernel,
        _EXPERTS,
        {**_GROUPED, "TOP_K": 8, "BIASED": False, "CLAMPED": False, "TILE_M": 16, "TILE_N": 64},
    ),
    "experts' gate and up, clamped": Build(
        gate_up_kernel,
        _EXPERTS,
        {**_GROUPED, "TOP_K": 4, "BIASED": True, "CLAMPED": True, "TILE_M": 128, "TILE_N": 64},
        8,
    ),
    "experts' down": Build(down_kernel, _EXPERTS, {**_GROUPED, "BIASED": True, "TILE_M": 128, "TILE_N": 128}, 8),
    "experts' sum": Build(sum_kernel, {"pairs": "*bf16", "out": "*bf16"}, {"TOP_K": 8, "BLOCK": 1024}),
    "decode, split": Build(
        decode_kernel,
        {**_PAGED, "partial": "*fp32", "stats": "*fp32"},
        {**_TILES, "TILE_M": 16, "NUM_SPLITS": 8},
    ),
    "decode, whole, windowed": Build(
        decode_kernel,
        {**_PAGED, "partial": "*bf16", "stats": "*bf16"},
        {**_TILES, "TILE_M": 16, "NUM_SPLITS": 1, "WINDOW": 512},
    ),
    "decode, whole, capped, with sinks": Build(
        decode_kernel,
        {**_PAGED, "partial": "*bf16", "stats": "*bf16"},
        {**_TILES, "TILE_M": 16, "NUM_SPLITS": 1, "CAP": 72.0, "SINKS": True},
    ),
    "prefill, windowed, with sinks": Build(
        prefill_kernel,
        {**_PAGED, "query_start": "*i32"},
        {**_TILES, "TILE_M": 128, "WINDOW": 128, "SINKS": True, "ONE_LOOP": False},
        8,
    ),
    "merge": Build(
        merge_kernel,
        {"partial": "*fp32", "stats": "*fp32", "out": "*bf16"},
        {"HEAD_DIM": 128, "TILE_D": 128, "NUM_SPLITS": 8},
    ),
    "prefill": Build(
        prefill_kernel, {**_PAGED, "query_start": "*i32"}, {**_TILES, "TILE_M": 128, "ONE_LOOP": False}, 8
    ),
    "prefill, invariant": Build(
        prefill_kernel, {**_PAGED, "query_start": "*i32"}, {**_TILES, "TILE_M": 64, "ONE_LOOP": True}
    ),
    "latent decode, split": Build(
        latent_kernel,
        {**_LATENT, "partial": "*fp32", "stats": "*fp32"},
        {**_LATENT_TILES, "HEADS": 64, "QUERIES": 1, "NUM_SPLITS": 8},
        8,
        2,
    ),
    "latent decode of few heads": Build(
        latent_kernel,
        {**_LATENT, "partial": "*fp32", "stats": "*fp32"},
        {**_LATENT_TILES, "HEADS": 16, "QUERIES": 1, "NUM_SPLITS": 16},
        4,
        2,
    ),
    "latent decode from fp8": Build(
        latent_kernel,
        {**_LATENT, "cache": "*u8", "partial": "*fp32", "stats": "*fp32"},
        {**_LATENT_TILES, "HEADS": 16, "QUERIES": 1, "NUM_SPLITS": 16, "FP8": True},
        4,
        2,
    ),
    "latent prefill": Build(
        latent_kernel,
        {**_LATENT, "partial": "*bf16", "stats": "*bf16"},
        {**_LATENT_TILES, "HEADS": 16, "QUERIES": 4, "NUM_SPLITS": 1, "ONE_LOOP": True},
        8,
        2,
    ),
    "latent merge": Build(
        merge_kernel,
        {"partial": "*fp32", "stats": "*fp32", "out": "*bf16"},
        {"HEAD_DIM": 512, "TILE_D": 512, "NUM_SPLITS": 64},
        8,
    ),
    "norm": Build(rms_norm_kernel, _NORM, {"BLOCK": 4096, "ADD": False}, 8),
    "add and norm": Build(rms_norm_kernel, _NORM, {"BLOCK": 4096, "ADD": True}, 8),
    "silu": Build(silu_and_mul_kernel, {"x": "*bf16", "out": "*bf16"}, {"BLOCK": 1024}),
    "rope": Build(
        rope_kernel,
        {"q": "*bf16", "k": "*bf16", "positions": "*i64", "cos_sin": "*fp32"},
        {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "INTERLEAVED": False},
    ),
    "rope, interleaved": Build(
        rope_kernel,
        {"q": "*bf16", "k": "*bf16", "positions": "*i64", "cos_sin": "*fp32"},
        {"HEADS": 128, "KV_HEADS": 1, "HALF": 32, "INTERLEAVED": True},
    ),
    "store": Build(
        store_kv_kernel,
        {**dict.fromkeys(("k", "v", "k_cache", "v_cache", "k_scales", "v_scales"), "*bf16"), "slot_mapping": "*i64"},
        {"SCALED": False, "FP8": False, "BLOCK": 128},
        1,
    ),
    "store latent": Build(
        store_latent_kernel,
        {**dict.fromkeys(("latent", "key", "cache"), "*bf16"), "slot_mapping": "*i64"},
        {"FP8": False, "BLOCK": 512},
        2,
    ),
    "store latent, fp8": Build(
        store_latent_kernel,
        {**dict.fromkeys(("latent", "key"), "*bf16"), "cache": "*u8", "slot_mapping": "*i64"},
        {"FP8": True, "BLOCK": 512},
        2,
    ),
    "move blocks to the host": Build(
        move_blocks_kernel,
        {**dict.fromkeys(("cache", "packed"), "*i64"), "pairs": "*i32"},
        {"TO_PACKED": True, "BLOCK": 2048},
    ),
    "move blocks from the host": Build(
        move_blocks_kernel,
        {**dict.fromkeys(("cache", "packed"), "*i64"), "pairs": "*i32"},
        {"TO_PACKED": False, "BLOCK": 2048},
    ),
    "store, fp8 with scales": Build(
        store_kv_kernel,
        {"k": "*bf16", "v": "*bf16", **_SMALL_CACHE, "slot_mapping": "*i64"},
        {"SCALED": True, "FP8": True, "BLOCK": 128},
        1,
    ),
    "decode, split, fp8": Build(
        decode_kernel,
        {**_PAGED, **_SMALL_CACHE, "partial": "*fp32", "stats": "*fp32"},
        {**_TILES, "CACHE": "fp8", "TILE_M": 16, "NUM_SPLITS": 8},
    ),
    "prefill, fp8 with scales": Build(
        prefill_kernel,
        {**_PAGED, **_SMALL_CACHE, "query_start": "*i32"},
        {**_TILES, "CACHE": "scaled", "TILE_M": 128, "ONE_LOOP": False},
        8,
    ),
    "linear, invariant, few rows": _invariant(1, 24576, "bf16", torch.bfloat16),
    "linear, invariant, few outputs": _invariant(64, 4096, "bf16", torch.bfloat16),
    "linear, invariant": _invariant(256, 4096, "fp16", torch.float16),
    "linear, invariant, many rows": _invariant(1024, 4096, "bf16", torch.bfloat16),
    "linear, invariant, float32": _invariant(64, 4096, "fp32", torch.float32),
    "linear, fp8": Build(scaled_linear_kernel, _SCALED, {**_SCALED_TILES, "KIND": "fp8"}),
    "linear, int8": Build(scaled_linear_kernel, _SCALED, {**_SCALED_TILES, "KIND": "int8", "TILE_T": 64, "TILE_N": 64}),
    "linear, int4": Build(scaled_linear_kernel, _SCALED, {**_SCALED_TILES, "KIND": "int4", "BLOCK": 32}),
    "embedding, int4": Build(
        scaled_embedding_kernel, {**_SCALED, "token_ids": "*i64"}, {"KIND": "int4", "BLOCK": 128}, 1
    ),
    "penalties": Build(penalties_kernel, _PENALTIES, {"BLOCK": 1024}),
    "update tables": Build(update_tables_kernel, dict.fromkeys(("tables", "updates", "count"), "*i32"), {"BLOCK": 128}),
    "decode inputs": Build(
        decode_inputs_kernel,
        {
            **dict.fromkeys(("rows", "tables", "kv_lens", "row_tables"), "*i32"),
            **dict.fromkeys(
                ("last_tokens", "token_ids", "positions", "slot_mapping", "slots", "new_positions"), "*i64"
            ),
        },
        {"BLOCK": 1024},
    ),
    "receive": Build(receive_kernel, dict.fromkeys(("ring", "turn", "tables", "rows"), "*i32"), {"BLOCK": 128}),
    "publish": Build(
        publish_kernel,
        {**dict.fromkeys(("tokens", "ring", "turn"), "*i32"), **dict.fromkeys(("slots", "last_tokens"), "*i64")},
        {"BLOCK": 256},
    ),
    "keep tokens": Build(
        keep_tokens_kernel, {"tokens": "*i32", "slots": "*i64", "last_tokens": "*i64"}, {"BLOCK": 128}
    ),
    "token mask": Build(token_mask_kernel, {"logits": "*fp32", "mask": "*i32", "rows": "*i64"}, {"BLOCK": 1024}),
    "sample": Build(sample_kernel, _SAMPLE, {"BLOCK": 1024}, 8),
}


@functools.cache
def compile_for(name: str, capability: int) -> Any:
    build = BUILDS[name]
    types = {
        name: "constexpr" if name in build.constants else build.types.get(name, "i32")
        for name in build.kernel.arg_names
    }
    source = ASTSource(build.kernel, types, dict(build.constants))
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": build.num_warps, "num_stages": build.num_stages},
    )


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("name", BUILDS)
def test_kernel_compiles_for_hopper(name: str) -> None:
    compiled = compile_for(name, 90)
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert ".target sm_90a" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024


def test_prefill_uses_hoppers_matrix_instructions() -> None:
    assert "wgmma" in compile_for("prefill", 90).asm["ptx"]


def test_experts_of_a_prefill_use_hoppers_matrix_instructions() -> None:
    assert "wgmma" in compile_for("experts' gate and up, clamped", 90).asm["ptx"]


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "half", "rows"),
    [(8, 128, True, 16), (512, 8, True, 64), (65536, 128, True, 128), (65536, 128, False, 64)],
)
def test_tiles_of_experts_are_as_tall_as_their_average(num_pairs: int, num_experts: int, half: bool, rows: int) -> None:
    assert tile_rows(num_pairs, num_experts, half) == rows


@pytest.mark.parametrize("num_pairs", [1, 2, 7, 16, 890, 4084])
def test_sorted_pairs_lie_alike_whatever_their_number(num_pairs: int) -> None:
    parts = aligned_parts([6, num_pairs, 3 * num_pairs, 1], torch.device("cpu"))
    assert [len(part) for part in parts] == [6, num_pairs, 3 * num_pairs, 1]
    assert [(part.data_ptr() - parts[0].data_ptr()) % 16 for part in parts] == [0] * 4
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [int(part.sum()) for part in parts] == [0, num_pairs, 6 * num_pairs, 3], "and none lies over another"
    for one in (count_kernel, place_kernel):
        (parameter,) = (parameter for parameter in one.params if parameter.name == "num_pairs")
        assert parameter.do_not_specialize


@pytest.mark.parametrize("name", ["decode, split", "decode, split, fp8", "store, fp8 with scales", "linear, fp8"])
def test_kernel_compiles_for_ampere(name: str) -> None:
    assert compile_for(name, 80).asm["cubin"][:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("num_programs", "max_kv_len", "splits"),
    [(8, 1024, 8), (8, 128_000, 32), (512, 4096, 1), (64, 100, 1), (1, 10**6, 64)],
)
def test_splits_fill_the_cores_and_leave_each_enough_tokens(num_programs: int, max_kv_len: int, splits: int) -> None:
    assert num_splits(num_programs, max_kv_len, 132) == splits


@pytest.mark.parametrize(
    ("kernel", "columns"),
    [
        (penalties_kernel, {"slots", "repetition", "frequency", "presence"}),
        (sample_kernel, {"temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions"}),
        (token_mask_kernel, {"mask", "rows"}),
    ],
    ids=["penalties", "sample", "token mask"],
)
def test_where_a_column_of_parameters_begins_makes_no_new_variant(kernel: Any, columns: set[str]) -> None:
    # With so many rows that a column begins at a multiple of 16 bytes, another kernel would be compiled, after ready.
    assert {param.name for param in kernel.params if param.do_not_specialize_on_alignment} == columns
