# SPDX-License-Identifier: MIT
"""Which files of a folder are a checkpoint, and indexes that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.config.model_error import ModelError
from tokenspeed.weights.pt_reader import PtReader
from tokenspeed.weights.safetensors_reader import SafetensorsReader


@pytest.mark.parametrize(
    "beside", ["consolidated.safetensors", "adapter_model.safetensors", "model.fp16.safetensors", "other.safetensors"]
)
def test_what_lies_beside_a_whole_checkpoint_is_no_part_of_it(tmp_path: Path, beside: str) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"layers.0.weight": torch.zeros(2)}, tmp_path / beside)
    assert SafetensorsReader(tmp_path).names() == {"weight"}


@pytest.mark.parametrize("beside", ["training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"])
@pytest.mark.parametrize("parts", [["pytorch_model.bin"], ["part-1.bin", "part-2.bin"]], ids=["whole", "parts"])
def test_what_trainers_leave_beside_a_checkpoint_is_not_opened(tmp_path: Path, parts: list[str], beside: str) -> None:
    for part in parts:
        torch.save({part: torch.ones(2)}, tmp_path / part)
    torch.save(ModelError("holds more than tensors"), tmp_path / beside)
    assert PtReader(tmp_path).names() == set(parts)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("../elsewhere/model.safetensors", "which is no file in this folder"),
        ("/elsewhere/model.safetensors", "which is no file in this folder"),
        ("a" * 5000, "which is no file in this folder"),
        (5, "names '5', which is no file"),
        (None, "names 'None', which is no file"),
        ([], "which is no file"),
        ("", "the shard is missing"),
        ("folder", "the shard is missing"),
        ("link", "the shard is missing"),
        ("absent.safetensors", "absent.safetensors: the shard is missing"),
    ],
)
def test_index_that_names_no_file_of_the_folder_is_refused(tmp_path: Path, named: Any, message: str) -> None:
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    (folder / "link").symlink_to("link")
    (tmp_path / "elsewhere").mkdir()
    for file in (folder / "shard.safetensors", tmp_path / "elsewhere/model.safetensors"):
        save_file({"weight": torch.ones(2)}, file)
    index = {"weight_map": {"weight": "shard.safetensors", "other": named}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message) as raised:
        SafetensorsReader(folder)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(str(folder))
