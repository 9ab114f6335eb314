# SPDX-License-Identifier: MIT
"""The compiled CUDA kernels hold code for every GPU we name, under the names that the launchers ask for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import cuda_driver
from tokenspeed_kernel.attention import cuda_mla, cuda_paged, cuda_plan
from tokenspeed_kernel.cuda_driver import Image, fatbin_for, read_fatbin
from tokenspeed_kernel.cuda_memory import _Memory
from tokenspeed_kernel.gemm import cuda_invariant, cuda_skinny, cuda_stream, cuda_wide
from tokenspeed_kernel.gemm.signature import MANY_TOKENS, counted_tokens
from tokenspeed_kernel.norm.cuda_norm import plan
from tokenspeed_kernel.registry import Platform, explain
from tokenspeed_kernel.rope import cuda_norm_store

FOLDER = Path(cuda_driver.__file__).parent / "csrc" / "cuda"
NAMES = [
    "add_rms_norm",
    "decode_attention",
    "decode_plan",
    "latent_attention",
    "latent_decode",
    "latent_plan",
    "norm_rope_store",
    "prefill_attention",
    "prefill_plan",
    "sample",
    "skinny_gemm",
    "stream_gemm",
    "wide_gemm",
]
HOPPER = Platform("x86_64", frozenset(), (9, 0), "H")


@pytest.fixture(params=NAMES)
def fatbin(request: pytest.FixtureRequest) -> Path:
    path = FOLDER / f"{request.param}.fatbin"
    if not path.exists():
        pytest.skip("not built here: `tools/build_native.sh cuda` or Bazel makes it")
    return path


def test_fatbin_holds_machine_code_for_ampere_hopper_and_blackwell(fatbin: Path) -> None:
    assert set(read_fatbin(fatbin)) == {Image(8, 0, False), Image(9, 0, True), Image(10, 0, False)}


def test_every_variant_of_the_norm_that_its_launcher_names_is_in_it() -> None:
    path = FOLDER / "add_rms_norm.fatbin"
    if not path.exists():
        pytest.skip("not built here: `tools/build_native.sh cuda` or Bazel makes it")
    data = path.read_bytes()
    for suffix in ("f32", "bf16", "f16"):
        for hidden in range(8, 16385, 8):
            size = 4 if suffix == "f32" else 2
            each, threads, packs = plan(hidden, size)
            assert threads <= 1024 and threads * each >= packs
            assert f"add_rms_norm_{suffix}_{each}".encode() in data


@pytest.mark.parametrize(
    ("image", "capability", "runs"),
    [
        (Image(8, 0, False), (8, 6), True),
        (Image(8, 0, False), (9, 0), False),
        (Image(9, 0, True), (9, 0), True),
        (Image(10, 0, False), (10, 3), True),
        (Image(10, 0, False), (12, 0), False),
    ],
)
def test_machine_code_runs_on_its_own_major_capability(image: Image, capability: tuple[int, int], runs: bool) -> None:
    assert image.runs_on(capability) == runs


def test_other_file_is_not_taken_for_a_fatbin(tmp_path: Path) -> None:
    path = tmp_path / "x.fatbin"
    path.write_bytes(b"something else, long enough")
    with pytest.raises(ValueError, match="is not a fatbin"):
        read_fatbin(path)


def test_missing_fatbin_is_a_reason_that_says_what_to_run() -> None:
    assert fatbin_for("nothing")(HOPPER) == "csrc/cuda/nothing.fatbin is not built; run tools/build_native.sh cuda"


def test_gpu_without_code_is_a_reason(fatbin: Path) -> None:
    reason = fatbin_for(fatbin.stem)(Platform("x86_64", frozenset(), (12, 0), "B"))
    assert reason is not None and "holds no code for this GPU" in reason


def test_cuda_kernel_wins_over_triton_where_rows_fit_its_packs(fatbin: Path) -> None:
    def winner(hidden: int) -> list[str]:
        told = explain("norm.add_rms", platform=HOPPER, device="cuda", dtype=torch.bfloat16, hidden=hidden)
        return [name for name, verdict, _ in told if verdict == "chosen"]

    assert winner(4096) == ["cuda_bf16"]
    assert winner(1001) == ["triton"]


def names_in(fatbin: str) -> bytes:
    path = FOLDER / f"{fatbin}.fatbin"
    if not path.exists():
        pytest.skip("not built here: `tools/build_native.sh cuda` or Bazel makes it")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("fatbin", "functions"),
    [
        (
            "decode_attention",
            [f"decode_{kind}_bf16_{heads}" for kind in ("attention", "few") for heads in (2, 4, 8)],
        ),
        ("decode_plan", ["decode_plan"]),
        ("latent_attention", ["latent_decode_bf16", "latent_prefill_bf16"]),
        ("latent_decode", ["latent_decode_few_bf16"]),
        ("latent_plan", ["latent_plan"]),
        ("prefill_attention", ["prefill_attention_bf16"]),
        ("prefill_plan", ["prefill_plan"]),
        ("sample", ["sample_rows"]),
        (
            "norm_rope_store",
            [
                f"norm_rope_store_{name}_{head_dim}"
                for name in ("bf16", "bf16_f32", "f16", "f16_f32")
                for head_dim in (64, 128, 256)
            ],
        ),
        (
            "skinny_gemm",
            [
                f"skinny_gemm_{name}_{variant}"
                for name in ("bf16", "f16")
                for variant in ("sixteen", "eight", "deep", "gated", "f32_sixteen", "f32_eight")
            ],
        ),
        (
            "stream_gemm",
            [
                f"stream_gemm_{kind}_{groups}_{cut.columns}x{cut.panels}_{cut.split}"
                for (kind, groups), cuts in cuda_stream.CUTS.items()
                for cut in cuts
            ],
        ),
        ("wide_gemm", [f"wide_gemm_{kind}" for kind in ("linear", "gated", "logits")]),
    ],
)
def test_every_function_that_a_launcher_names_is_in_its_fatbin(fatbin: str, functions: list[str]) -> None:
    data = names_in(fatbin)
    assert [name for name in functions if name.encode() not in data] == []


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows"),
    [
        (1024, 1024, "eight"),
        (4096, 2040, "eight"),
        (4096, 2048, "deep"),
        (4096, 12288, "deep"),
        (6144, 4096, "sixteen"),
        (151936, 4096, "sixteen"),
    ],
)
def test_skinny_products_own_eight_rows_where_sixteen_would_leave_cores_idle_and_go_deep_where_rows_are_long(
    outputs: int, inputs: int, rows: str
) -> None:
    assert cuda_skinny.owned_rows(outputs, inputs) == rows
    assert rows != "deep" or cuda_skinny.num_warps(outputs, inputs) * 256 <= inputs


@pytest.mark.parametrize(
    ("heads", "head_dim", "cut"),
    [(48, 128, (1, 6)), (18, 64, (1, 2)), (3, 256, (1, 1)), (104, 256, (4, 7)), (80, 64, (1, 5)), (72, 128, (2, 5))],
)
def test_heads_of_a_token_are_dealt_out_evenly_to_warps_of_one_block_or_a_few(
    heads: int, head_dim: int, cut: tuple[int, int]
) -> None:
    blocks, warps = cuda_norm_store.cut(heads, head_dim)
    assert (blocks, warps) == cut
    # The kernel works out the blocks of a token from their size, and must come to as many.
    assert blocks == -(-heads // (warps * cuda_norm_store.heads_of_a_warp(head_dim)))


def test_a_product_adds_to_the_residual_itself_where_the_weight_is_dense_and_rows_may_meet() -> None:
    def winner(format: str, layout: str, invariant: bool) -> str:
        told = explain(
            "gemm.linear_add", platform=HOPPER, device="cuda", dtype=torch.bfloat16, batch_invariant=invariant,
            weight_format=format, weight_layout=layout,
        )  # fmt: skip
        return next(name for name, verdict, _ in told if verdict == "chosen")

    assert winner("bfloat16", "rows", invariant=False) == "torch_bfloat16"
    assert winner("bfloat16", "rows", invariant=True) == "composed_cuda"
    assert winner("fp8_b128", "rounded", invariant=False) == "composed_cuda"


@pytest.mark.parametrize(
    ("outputs", "inputs", "warps"), [(4096, 4096, 8), (4096, 1024, 8), (4096, 264, 3), (151936, 4096, 4), (64, 8, 1)]
)
def test_skinny_products_have_a_warp_for_a_chunk_of_k(outputs: int, inputs: int, warps: int) -> None:
    assert cuda_skinny.num_warps(outputs, inputs) == warps


@pytest.mark.parametrize(
    ("rows", "slots", "longest", "parts"),
    [(1, 66, 40_960, 64), (8, 66, 1024, 128), (64, 66, 64, 64), (4, 528, 100, 8), (256, 66, 4096, 322)],
)
def test_decoding_has_room_for_as_many_parts_as_rows_and_cores_can_ask_for(
    rows: int, slots: int, longest: int, parts: int
) -> None:
    assert cuda_plan.most_own_parts(rows, slots, longest) == parts


@pytest.mark.parametrize(
    ("rows", "longest", "parts"), [(1, 40_960, 32), (1, 1024, 16), (3, 40_960, 22), (3, 100, 2), (3, 10, 1)]
)
def test_a_few_rows_are_cut_as_their_length_and_the_cores_allow(rows: int, longest: int, parts: int) -> None:
    assert cuda_paged.num_parts(rows, 66, longest) == parts


@pytest.mark.parametrize(("rows", "shared", "pays"), [(32, 4096, True), (64, 1024, False), (8, 4096, False)])
def test_rows_share_a_prefix_only_where_that_was_measured_to_pay(rows: int, shared: int, pays: bool) -> None:
    assert ((rows - 1) * shared >= cuda_paged.least_saved(8)) == pays


@pytest.mark.parametrize(("rows", "per_tile", "items"), [(1, 16, 0), (2, 16, 25), (32, 16, 48), (256, 8, 400)])
def test_groups_have_room_for_pairs_and_a_single_row_has_none(rows: int, per_tile: int, items: int) -> None:
    assert cuda_plan.most_shared_items(rows, per_tile) == items


@pytest.mark.parametrize(
    ("kind", "rows", "inputs"),
    [("linear", 4096, 12288), ("linear", 6144, 4096), ("gated", 24576, 4096), ("logits", 151936, 4096)],
)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_streamed_products_leave_few_cores_idle_and_need_not_share_k(
    kind: str, rows: int, inputs: int, groups: int
) -> None:
    cut = cuda_stream.pick_cut(kind, groups, rows, inputs)
    assert -(-rows // cut.columns) * cut.split >= 128
    assert cuda_stream.pick_cut(kind, groups, rows, inputs, whole=True).split == 1


@pytest.mark.parametrize("inputs", [8, 64, 72, 128, 136, 256, 4096])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_block_that_shares_k_has_some_of_it(inputs: int, groups: int) -> None:
    for rows in (16, 64, 1024, 4096):
        cut = cuda_stream.pick_cut("linear", groups, rows, inputs)
        assert -(-inputs // (64 * cut.panels)) >= cut.split


def test_sums_of_a_cluster_and_two_stages_fit_its_shared_memory() -> None:
    for (_, groups), cuts in cuda_stream.CUTS.items():
        for cut in cuts:
            tokens = 64 * groups
            stages = cuda_stream.num_stages(cut, tokens, cuda_stream.shared_bytes(cut, groups, 151936))
            assert stages >= 2
            assert cut.split == 1 or 4 * tokens * (cut.columns + 8) <= stages * cuda_stream.stage_bytes(cut, tokens)


def test_rows_of_x_are_counted_one_by_one_where_tiles_change_and_in_steps_above() -> None:
    assert [counted_tokens(n) for n in (1, 9, 256, 257, 1000, 10**6)] == [1, 9, 256, 320, 1024, MANY_TOKENS]


def winner_of(op: str, tokens: int, outputs: int, platform: Platform = HOPPER) -> str:
    told = explain(
        op, platform=platform, device="cuda", dtype=torch.bfloat16, tokens=counted_tokens(tokens), inputs=4096,
        outputs=outputs, weight_format="bfloat16", weight_layout="rows",
    )  # fmt: skip
    return next(name for name, verdict, _ in told if verdict == "chosen")


def test_products_are_by_the_kernel_for_their_number_of_rows() -> None:
    names_in("skinny_gemm"), names_in("stream_gemm"), names_in("wide_gemm")
    assert {winner_of("gemm.linear", tokens, 6144) for tokens in (1, 8, 32, 192)} == {"cuda_stream"}
    assert (winner_of("gemm.linear", 8, 1024), winner_of("gemm.linear", 9, 1024)) == ("cuda_bf16", "cuda_stream")
    assert winner_of("gemm.linear", 9, 256) == "torch_bfloat16"  # too few blocks for the cores
    assert winner_of("gemm.linear", 1024, 6144) == "cuda_wide"
    assert winner_of("gemm.linear", 1100, 6144) == "torch_bfloat16"  # a second round of few tiles
    assert winner_of("gemm.linear_silu_and_mul", 8192, 24576) == "cuda_wide"
    assert winner_of("gemm.linear_silu_and_mul", 384, 24576) == "composed_cuda"
    assert (winner_of("gemm.logits", 1, 151936), winner_of("gemm.logits", 64, 151936)) == ("cuda_bf16", "cuda_stream")


def test_products_on_other_gpus_are_as_before() -> None:
    names_in("skinny_gemm")
    ampere = Platform("x86_64", frozenset(), (8, 0), "A")
    assert winner_of("gemm.linear", 8, 6144, ampere) == "cuda_bf16"
    assert winner_of("gemm.linear", 9, 6144, ampere) == "torch_bfloat16"


def test_solutions_whose_bits_no_batch_changes_are_there_for_every_number_of_rows_and_chosen_for_none() -> None:
    names_in("stream_gemm"), names_in("wide_gemm")
    for tokens in (1, 192, 193, 10**5):
        call: dict[str, Any] = {"tokens": counted_tokens(tokens), "inputs": 4096, "outputs": 6144}
        call |= {"weight_format": "bfloat16", "weight_layout": "rows"}
        for op in ("gemm.linear", "gemm.linear_silu_and_mul", "gemm.logits"):
            told = explain(op, platform=HOPPER, device="cuda", dtype=torch.bfloat16, **call)
            assert [verdict for name, verdict, _ in told if name == "cuda_invariant"] == ["eligible"]


@pytest.mark.parametrize(
    ("tokens", "rows", "inputs", "at_once"),
    [
        (1, 4096, 4096, 64),
        (192, 4096, 4096, 192),
        (256, 4096, 12288, 128),
        (256, 24576, 4096, 0),
        (9000, 4096, 4096, 0),
    ],
)
def test_invariant_products_stream_a_few_rows_after_the_others_or_are_wide(
    tokens: int, rows: int, inputs: int, at_once: int
) -> None:
    kind = "gated" if rows == 24576 else "linear"
    assert cuda_invariant.rows_at_once(kind, tokens, rows, inputs) == at_once


@pytest.mark.parametrize(
    ("tokens", "rows", "share"), [(256, 24576, 0.97), (1024, 6144, 0.97), (1024, 4096, 0.65), (384, 24576, 0.73)]
)
def test_wide_tiles_waste_what_does_not_fill_a_round_of_the_cores(tokens: int, rows: int, share: float) -> None:
    assert cuda_wide.share_used(tokens, rows) == pytest.approx(share, abs=0.01)


def test_attention_of_a_usual_model_is_cuda_on_hopper_and_triton_elsewhere(fatbin: Path) -> None:
    def winner(platform: Platform, **changes: object) -> list[str]:
        call: dict[str, Any] = {
            "head_dim": 128,
            "group_size": 4,
            "block_size": 16,
            "windowed": False,
            "softcap": False,
            "sinks": False,
        }
        told = explain(
            "attention.paged", platform=platform, device="cuda", dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
            **(call | changes),
        )  # fmt: skip
        return [name for name, verdict, _ in told if verdict == "chosen"]

    for name in ("decode_attention", "decode_plan", "prefill_attention", "prefill_plan"):
        names_in(name)
    assert winner(HOPPER) == ["cuda_bf16"]
    assert winner(HOPPER, windowed=True) == winner(HOPPER, head_dim=64) == winner(HOPPER, sinks=True) == ["triton"]
    assert winner(Platform("x86_64", frozenset(), (8, 0), "A")) == ["triton"]


def test_latent_attention_of_deepseeks_sizes_is_cuda_on_hopper_and_triton_elsewhere(fatbin: Path) -> None:
    def winner(platform: Platform, latent_dim: int, block_size: int = 64) -> list[str]:
        told = explain(
            "attention.mla", platform=platform, device="cuda", dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
            latent_dim=latent_dim, key_dim=64, block_size=block_size,
        )  # fmt: skip
        return [name for name, verdict, _ in told if verdict == "chosen"]

    for name in cuda_mla.FATBINS:
        names_in(name)
    assert winner(HOPPER, 512) == winner(HOPPER, 512, 16) == ["cuda_bf16"]
    assert winner(HOPPER, 512, 8) == ["triton"]
    assert winner(HOPPER, 256) == winner(Platform("x86_64", frozenset(), (8, 0), "A"), 512) == ["triton"]


def test_what_a_tensor_holds_of_its_owner_goes_without_a_collection() -> None:
    class Owner:
        pass

    owner = Owner()
    held, memory = weakref.ref(owner), _Memory(4096, (16,), torch.uint8, owner)
    assert memory.__cuda_array_interface__["data"] == (4096, False)
    gc.collect()
    gc.disable()
    try:
        del owner, memory
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [cuda_driver.swizzled_cache, cuda_driver.swizzled_cache_panels])
def test_a_cache_s_map_is_the_same_before_the_pool_has_its_blocks(
    make: Callable[[torch.Tensor, int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps are captured while the pool has one block, and keep the map.
    monkeypatch.setattr(cuda_driver, "_encode", lambda *arguments: arguments)
    cache = torch.zeros(8, 16, 576, dtype=torch.bfloat16)
    assert make(cache[:1], 16) == make(cache, 16)
