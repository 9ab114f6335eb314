# SPDX-License-Identifier: MIT
"""Tensors that a trainer sends in front of a quantized checkpoint: stored parts, dense weights, and what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from tests.support.quantized import SCHEMES, fp8_tensor, quantize_folder
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.models import LoadOptions, load_model
from tokenspeed.models.gguf_test import common_metadata, random_model, renamed, write
from tokenspeed.models.quantized_test import dense_model, load, logits_of, sizes_for
from tokenspeed.models.testing import PagedSequences
from tokenspeed.weights import KVFormat

Tensors = dict[str, torch.Tensor]
KINDS = ("fp8 in tiles", "fp8 with static inputs", "w8a8 fp8", "w8a8 int8", "w4a16 with an order of columns")
GGUF_PROMPT = list(range(5, 40))
PACKED = ("w4a16 with zero points", "nvfp4", "gptq", "awq")


def checkpoint(folder: Path, name: str, factor: float) -> Tensors:
    """A quantized checkpoint whose values are `factor` times those of another; its dense meaning."""
    theirs = dense_model(folder, sizes_for(name))
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if parameter_name.endswith("_proj.weight"):
                parameter.mul_(factor)
    theirs.save_pretrained(folder)
    return quantize_folder(folder, SCHEMES[name])


def logits_with(folder: Path, sent: Tensors) -> torch.Tensor:
    kv = KVFormat(torch.float32, False, None)
    quantization = load_model_config(ModelSource("folder", folder, "test")).quantization
    return logits_of(load(folder, options=LoadOptions(quantization, {}, kv, named_tensors=sent)))


@pytest.mark.parametrize("name", [*KINDS, *PACKED])
def test_stored_parts_and_dense_weights_serve_as_a_checkpoint_that_has_them(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path / "old", name, 1.0)
    meant = checkpoint(tmp_path / "new", name, 0.5)
    before, expected = logits_of(load(tmp_path / "old")), logits_of(load(tmp_path / "new"))
    assert not torch.allclose(before, expected, atol=1e-2)
    stored = load_file(tmp_path / "new" / "model.safetensors")
    assert torch.equal(logits_with(tmp_path / "old", stored), expected)
    projections = {name: tensor for name, tensor in meant.items() if name.endswith("_proj.weight")}
    dense = logits_with(tmp_path / "old", projections)
    torch.testing.assert_close(dense, expected, rtol=3e-2, atol=3e-2 * float(expected.std()))


@pytest.mark.parametrize("name", PACKED)
def test_a_part_that_nothing_would_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, name, 1.0)
    module = "model.layers.1.mlp.up_proj"
    parts, _ = fp8_tensor(torch.randn(sizes_for(name).get("intermediate_size", 160), 128))
    with pytest.raises(ModelError, match=rf"{module}\.weight"):
        logits_with(tmp_path, {f"{module}.{part}": value for part, value in parts.items()})


def test_parts_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, "w4a16 with zero points", 1.0)
    wrong = {"model.layers.0.self_attn.q_proj.weight_packed": torch.zeros(128, 8, dtype=torch.int32)}
    with pytest.raises(ModelError, match=r"q_proj"):
        logits_with(tmp_path, wrong)


def test_a_gguf_file_takes_dense_weights_by_the_names_and_in_the_layout_of_transformers(tmp_path: Path) -> None:
    old, new = random_model("Llama"), random_model("Llama", seed=4)

    def special(part: str, tensor: torch.Tensor) -> Tensors | None:
        """The format keeps the halves of a head's rotary pairs next to each other."""
        for name, heads in (("q", 4), ("k", 2)):
            if part == f"self_attn.{name}_proj.weight":
                halves = tensor.view(heads, 2, -1, tensor.shape[1])
                return {f"attn_{name}.weight": halves.transpose(1, 2).reshape(tensor.shape)}
        return None

    path = tmp_path / "m.gguf"
    packed = {"ffn_down.weight": gguf.GGMLQuantizationType.Q8_0, "attn_q.weight": gguf.GGMLQuantizationType.Q8_0}
    write(path, "llama", common_metadata(old.config), renamed(old, special), packed)
    source = ModelSource("gguf", path, "test")
    config = load_model_config(source)

    def served(sent: Tensors) -> torch.Tensor:
        options = LoadOptions(config.quantization, {}, KVFormat(torch.float32, False, None), named_tensors=sent)
        model = load_model(source, config, "cpu", torch.float32, options=options)
        return PagedSequences(model, 1, 64).prefill(0, GGUF_PROMPT)

    sent = dict(new.state_dict())
    with torch.inference_mode():
        expected = new(torch.tensor([GGUF_PROMPT])).logits[0]
    assert not torch.allclose(served({}), expected, atol=1e-2)
    torch.testing.assert_close(served(sent), expected, rtol=1e-4, atol=1e-4)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ModelError, match=name):
        served({name: sent[name].to(torch.int8)})
