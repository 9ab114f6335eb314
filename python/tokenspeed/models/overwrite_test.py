# SPDX-License-Identifier: MIT
"""A model whose weights were overwritten computes what a model loaded with the new ones does, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.models import load_model, overwrite
from tokenspeed.models.overwrite import parts_of
from tokenspeed.models.testing import MODELS, SMALL, logits
from tokenspeed.weights import dummy_reader


def load(folder: Path, changes: dict[str, Any], staged: bool = False) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL | changes))
    source = ModelSource("folder", folder, "test")
    return load_model(source, load_model_config(source), "cpu", torch.float32, "dummy", staged=staged)


@pytest.mark.parametrize("name", MODELS)
def test_an_overwritten_model_is_the_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = load(tmp_path, MODELS[name])
    before = logits(model)
    addresses = [part.data_ptr() for _, part in parts_of(model) if isinstance(part, torch.Tensor)]
    monkeypatch.setattr(dummy_reader, "_STANDARD_DEVIATION", 0.1)
    other = load(tmp_path, MODELS[name], staged=True)
    expected = logits(load(tmp_path, MODELS[name]))
    assert not torch.equal(expected, before)
    overwrite(model, other)
    assert torch.equal(logits(model), expected)
    assert addresses == [part.data_ptr() for _, part in parts_of(model) if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize(
    "changes", [{"intermediate_size": 96}, {"num_hidden_layers": 3}, {"rms_norm_eps": 0.5}], ids=str
)
def test_a_model_of_another_kind_changes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = load(tmp_path, MODELS["dense"])
    before = logits(model)
    with pytest.raises(ModelError, match="start an engine with it"):
        overwrite(model, load(tmp_path, MODELS["dense"] | changes, staged=True))
    assert torch.equal(logits(model), before)
