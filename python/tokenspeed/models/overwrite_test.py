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
from tokenspeed.models.testing import PagedSequences
from tokenspeed.weights import dummy_reader

PROMPT = list(range(3, 17))
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "attention_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen3ForCausalLM"]},
    "tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "gemma": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "query_pre_attn_scalar": 16},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
    "sinks": {"architectures": ["GptOssForCausalLM"], **OSS},
    "latent": LATENT,
}


def load(folder: Path, changes: dict[str, Any], staged: bool = False) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL | changes))
    source = ModelSource("folder", folder, "test")
    return load_model(source, load_model_config(source), "cpu", torch.float32, "dummy", staged=staged)


def logits(model: Any) -> torch.Tensor:
    return PagedSequences(model, 1, 16).prefill(0, PROMPT)


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
