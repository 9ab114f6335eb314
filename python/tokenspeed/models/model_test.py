# SPDX-License-Identifier: MIT
"""Loading as a whole: cache sizes, dummy weights, what is refused, and the same logits on one rank and on two."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource, embedded_model_path
from tokenspeed.layers.cache import total_block_bytes
from tokenspeed.models import load_model, model_class
from tokenspeed.models.testing import PagedSequences, logits_of_two_ranks
from tokenspeed.parallel import Group

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
PROMPT = [5, 9, 33, 1, 60, 7, 7, 2]


def folder_with(folder: Path, changes: dict[str, Any]) -> ModelSource:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return ModelSource("folder", folder, "test")


def write_weights(folder: Path) -> None:
    """The checkpoint of the folder's config with random values."""
    torch.manual_seed(1)
    config = json.loads((folder / "config.json").read_text())
    vocab, inner = config["vocab_size"], config["intermediate_size"]
    layer = {
        "self_attn.q_proj": (64, 32),
        "self_attn.k_proj": (32, 32),
        "self_attn.v_proj": (32, 32),
        "self_attn.o_proj": (32, 64),
        "self_attn.q_norm": (16,),
        "self_attn.k_norm": (16,),
        "mlp.gate_proj": (inner, 32),
        "mlp.up_proj": (inner, 32),
        "mlp.down_proj": (32, inner),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (vocab, 32), "model.norm.weight": (32,), "lm_head.weight": (vocab, 32)}
    tensors = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


def load(source: ModelSource, load_format: str = "auto", group: Group | None = None) -> Any:
    return load_model(source, load_model_config(source), "cpu", torch.float32, load_format, group=group)


def test_cache_sizes_follow_the_config(tmp_path: Path) -> None:
    model = load(folder_with(tmp_path, {}), "dummy")
    layers = model.kv_cache(8)
    assert [[tensor.block_shape for tensor in layer] for layer in layers] == [[(2, 8, 16), (2, 8, 16)]] * 2
    assert total_block_bytes(layers) == 8 * 2 * 2 * 2 * 16 * 4


def test_dummy_weights_need_no_files_and_are_the_same_every_time(tmp_path: Path) -> None:
    source = folder_with(tmp_path, {"tie_word_embeddings": True})
    logits = [PagedSequences(load(source, "dummy"), 1, 16).prefill(0, PROMPT) for _ in range(2)]
    assert torch.equal(*logits)
    assert torch.isfinite(logits[0]).all()
    assert logits[0].std() > 0


def test_dummy_weights_of_a_packed_model_are_dense(tmp_path: Path) -> None:
    source = ModelSource("gguf", embedded_model_path(), "embedded")
    config = dataclasses.replace(load_model_config(source), num_layers=1, windows=(0,), vocab_size=512)
    model = load_model(source, config, "cpu", torch.float32, "dummy")
    assert torch.isfinite(PagedSequences(model, 1, 16).prefill(0, PROMPT)).all()


def test_step_that_samples_nothing_still_fills_the_cache(tmp_path: Path) -> None:
    model = load(folder_with(tmp_path, {}), "dummy")
    whole = PagedSequences(model, 1, 16).prefill(0, PROMPT)
    silent = PagedSequences(model, 1, 16)
    assert [logits.shape for logits in silent.step([(0, PROMPT[:5])], samples=False)] == [(0, 64)]
    assert torch.equal(silent.step([(0, PROMPT[5:])])[0], whole[5:])


def test_weights_larger_than_memory_are_one_line(tmp_path: Path) -> None:
    source = folder_with(tmp_path, {"vocab_size": 2**40})
    with pytest.raises(ModelError, match="the weights do not fit in the memory of cpu") as raised:
        load(source, "dummy")
    assert "\n" not in str(raised.value)


def test_progress_ends_with_one_line(tmp_path: Path) -> None:
    source = folder_with(tmp_path, {})
    write_weights(tmp_path)
    out = io.StringIO()
    load_model(source, load_model_config(source), "cpu", torch.float32, progress=out)
    assert out.getvalue().startswith("Loading weights: 25 tensors in ")
    assert out.getvalue().count("\n") == 1


def test_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    source = folder_with(tmp_path, {})
    write_weights(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load(source)


def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_weights(folder_with(tmp_path, {}).path)
    source = folder_with(tmp_path, {"intermediate_size": 128})
    with pytest.raises(ModelError, match=r"gate_proj\.weight' has shape \[64, 32\].*asks for \[128, 32\]") as raised:
        load(source)
    assert str(tmp_path / "model.safetensors") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_surplus_tensor_is_refused_but_computed_tables_are_not(tmp_path: Path) -> None:
    source = folder_with(tmp_path, {})
    write_weights(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    load(source)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.bias' has no place in this architecture"):
        load(source)


def test_unknown_load_format_and_architecture_are_refused_by_name(tmp_path: Path) -> None:
    source = folder_with(tmp_path, {})
    with pytest.raises(ModelError, match="--load-format sharded_state is not supported"):
        load(source, "sharded_state")
    with pytest.raises(ModelError, match="as --load-format gguf needs"):
        load(source, "gguf")
    with pytest.raises(ModelError, match="architecture FooForCausalLM is not supported"):
        model_class("FooForCausalLM")


def test_ranks_must_divide_the_heads(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="2 KV heads do not divide among 3 ranks"):
        load(folder_with(tmp_path, {}), "dummy", Group(0, 3))


@pytest.mark.parametrize(
    "change",
    [{"tie_word_embeddings": True}, {"vocab_size": 67, "intermediate_size": 37}],
    ids=["tied", "sizes that do not divide"],
)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path, change: dict[str, Any]) -> None:
    source = folder_with(tmp_path, change)
    write_weights(source.path)
    alone = load(source)
    sequences = PagedSequences(alone, 1, 16)
    expected = torch.cat([sequences.prefill(0, PROMPT), sequences.step([(0, [11])])[0]])
    for block_bytes, logits in logits_of_two_ranks(tmp_path, PROMPT, 11):
        assert block_bytes == total_block_bytes(alone.kv_cache(16)) // 2
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
