# SPDX-License-Identifier: MIT
"""The compiled CUDA kernels hold code for every GPU we name, under the names that the launchers ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenspeed_kernel import cuda_driver
from tokenspeed_kernel.cuda_driver import Image, fatbin_for, read_fatbin
from tokenspeed_kernel.norm.cuda_norm import plan
from tokenspeed_kernel.registry import Platform, explain

FOLDER = Path(cuda_driver.__file__).parent / "csrc" / "cuda"
NAMES = [
    "add_rms_norm",
    "decode_attention",
    "norm_rope_store",
    "prefill_attention",
    "sample",
    "skinny_gemm",
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
