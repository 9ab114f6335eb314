# SPDX-License-Identifier: MIT
"""What a model that does not fit is told: numbers that a reader can act on, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenspeed.config.model_source import ModelSource
from tokenspeed.models.shortage import Shortage, asked_bytes


@pytest.mark.parametrize(
    ("words", "num_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has", 3 * 2**29),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", 20 * 2**20),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.", 4096),
        ("something else", 0),
    ],
)
def test_what_an_allocator_was_asked_for(words: str, num_bytes: int) -> None:
    assert asked_bytes(RuntimeError(words)) == num_bytes


def test_weights_in_files_need_what_the_files_have(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with (tmp_path / "model-2.safetensors").open("wb") as file:
        file.truncate(3 * 2**30)  # a hole: no disk is filled
    (tmp_path / "tokenizer.json").write_text("x" * 1000)
    shortage = Shortage(ModelSource("folder", tmp_path, "big"), torch.device("cpu"))
    error = RuntimeError("you tried to allocate 1073741824 bytes")
    assert "they need about 3.0 GiB; use a smaller model" in shortage.message(error, from_files=True)
    assert "they need more than 1.0 GiB" in shortage.message(error, from_files=False)
