# SPDX-License-Identifier: MIT
"""What the keys of a config.json may hold, and what they mean when they are left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config.gguf import read_gguf
from tokenspeed.config.model import ModelConfig, config_from_gguf, load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import embedded_model_path, resolve_model
from tokenspeed.config.testing import DEEPSEEK, GEMMA, folder_with

WRONG_VALUES: tuple[Any, ...] = (-1, 0, 1.5, 10**18, 1e30, float("nan"), True, "x", [], [1], [None], {"a": 1})
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "beta_fast": 32,
    "attention_factor": 1.0,
    "original_max_position_embeddings": 64,
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    "ignore": ["lm_head"],
}


def every_change(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`values` with one of them, at any depth, replaced by something else."""
    for key, value in values.items():
        yield from (values | {key: wrong} for wrong in (None, *WRONG_VALUES))
        if isinstance(value, dict):
            yield from (values | {key: changed} for changed in every_change(value))


GGUF_NUMBERS: dict[str, Any] = {
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.kv_lora_rank": 64,
    "attention.q_lora_rank": 64,
    "attention.sliding_window": 16,
    "rope.dimension_count": 32,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_count": 1,
    "expert_group_count": 2,
    "expert_group_used_count": 1,
    "expert_weights_scale": 2.0,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
}


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "Gemma3", "GptOss", "DeepseekV2", "DeepseekV3"])
def test_a_config_with_any_wrong_value_loads_or_is_refused_in_one_line(tmp_path: Path, architecture: str) -> None:
    config = DEEPSEEK if "Deepseek" in architecture else GEMMA | {"num_experts": 4, "moe_intermediate_size": 16}
    config = config | {
        "architectures": [f"{architecture}ForCausalLM"],
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE} if architecture == "Gemma3" else ROPE,
        "quantization_config": COMPRESSED if architecture == "GptOss" else {"weight_block_size": [8, 8]},
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "first_k_dense_replace": 1,
    }
    num_refused = 0
    for changed in every_change(config):
        try:
            load_model_config(folder_with(tmp_path, changed))
        except ModelError as error:
            assert "\n" not in str(error)
            num_refused += 1
    assert num_refused > 100


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3moe", "deepseek2", "gpt-oss"])
def test_gguf_metadata_with_any_wrong_value_loads_or_is_refused_in_one_line(architecture: str) -> None:
    file = read_gguf(embedded_model_path())
    numbers = {key.partition(".")[2]: value for key, value in file.metadata.items() if key.startswith("llama.")}
    metadata = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in (numbers | GGUF_NUMBERS).items()}
    if architecture == "gemma3":
        metadata = {key: value for key, value in metadata.items() if "expert" not in key}
    config_from_gguf(replace(file, metadata=metadata))
    num_refused = 0
    for changed in every_change(metadata):
        try:
            # GGUF knows no null.
            said = {key: value for key, value in changed.items() if value is not None}
            config_from_gguf(replace(file, metadata=said))
        except ModelError as error:
            assert "\n" not in str(error)
            num_refused += 1
    assert num_refused > 100


def test_links_that_lead_nowhere_are_refused_by_name(tmp_path: Path) -> None:
    source = folder_with(tmp_path, GEMMA)
    (tmp_path / "generation_config.json").symlink_to("generation_config.json")
    with pytest.raises(ModelError, match=r"generation_config\.json: cannot be read"):
        load_model_config(source)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("absent")
    with pytest.raises(ModelError, match=r"config\.json: a link that leads nowhere"):
        resolve_model(str(tmp_path))


def test_json_that_nests_without_end_is_no_json(tmp_path: Path) -> None:
    source = folder_with(tmp_path, {})
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="not JSON"):
        load_model_config(source)


def test_what_is_left_out_means_what_transformers_takes_it_for(tmp_path: Path) -> None:
    def without(architecture: str, *keys: str, **others: Any) -> ModelConfig:
        kept = {key: value for key, value in GEMMA.items() if key not in ("hidden_activation", *keys)}
        named = kept | others | {"architectures": [f"{architecture}ForCausalLM"]}
        return load_model_config(folder_with(tmp_path, named))

    gemma = without("Gemma3", "head_dim", "query_pre_attn_scalar", "rope_theta", "sliding_window")
    assert (gemma.head_dim, gemma.attention_scale, gemma.rope_theta, gemma.windows[0]) == (256, 1 / 16, 1e6, 4096)
    assert without("Qwen3", "head_dim").head_dim == 128
    assert without("Qwen2").windows == (0,) * 7
    assert without("Llama").windows == (0,) * 7
    assert without("Mistral", "sliding_window").windows == (4096,) * 7
    assert without("Mistral", sliding_window=None).windows == (0,) * 7
    windowed = without("Qwen3Moe", use_sliding_window=True, max_window_layers=3, num_experts=8, moe_intermediate_size=8)
    assert windowed.windows == (32,) * 7
    gpt_oss = without("GptOss", "rope_theta", num_local_experts=8)
    assert gpt_oss.qkv_bias and gpt_oss.rope_theta == 150000.0
    assert gpt_oss.rope_scaling is not None and gpt_oss.rope_scaling.factor == 32.0
    mixtral = without("Mixtral", "rope_theta", "rms_norm_eps", num_local_experts=8, num_key_value_heads=4)
    assert mixtral.moe is not None and mixtral.moe.top_k == 2
    assert (mixtral.rope_theta, mixtral.rms_norm_eps) == (1e6, 1e-5)
