# SPDX-License-Identifier: MIT
"""Every architecture and rope scaling on a small random config: logits and greedy tokens equal `transformers`'."""

from __future__ import annotations

import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenspeed.config.model import ModelConfig, load_model_config
from tokenspeed.config.model_source import ModelSource
from tokenspeed.models import Model, load_model
from tokenspeed.models.testing import PagedSequences
from tokenspeed_kernel import api

SMALL: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}

GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
GEMMA_BOTH = {
    "full_attention": YARN | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}

GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
}
QWEN3_MOE = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 32}

DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "topk_group": 2,
    "n_group": 4,
}
GROUPED = {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}
LOUD_YARN = YARN | {"rope_theta": 10000.0, "mscale": 0.7, "mscale_all_dim": 0.9}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases and tied embeddings": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama with its own head size": ("Llama", {"head_dim": 32}),
    "llama with one KV head": ("Llama", {"num_key_value_heads": 1}),
    "llama with rope theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}}),
    "yarn rope": ("Llama", {"rope_parameters": YARN | {"rope_theta": 10000.0}}),
    "yarn rope with mscale": (
        "Qwen2",
        {"rope_parameters": YARN | {"rope_theta": 1e6, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}},
    ),
    "yarn rope with its own attention factor": (
        "Qwen3",
        {"rope_parameters": YARN | {"rope_theta": 1e6, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}},
    ),
    "longrope": ("Llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 128}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with a window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window in the last layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral with a window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 9}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss with an early clamp, without yarn": (
        "GptOss",
        GPT_OSS | {"swiglu_limit": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3-moe with layers of one network and scores that are not renormalised": (
        "Qwen3Moe",
        QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "deepseek-v2-lite": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-v2": ("DeepseekV2", DEEPSEEK | GROUPED | {"rope_parameters": LOUD_YARN}),
    "deepseek-v2 with experts in every layer and biases": (
        "DeepseekV2",
        DEEPSEEK | {"q_lora_rank": 24, "n_shared_experts": 1, "first_k_dense_replace": 0, "attention_bias": True},
    ),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": 24, "rope_parameters": LOUD_YARN}),
    "deepseek-v3 with halves as pairs and scores that are not renormalised": (
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "deepseek-v3 with sizes that fill no register": (
        "DeepseekV3",
        DEEPSEEK
        | {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 7},
    ),
    "llama with heads that fill no register": ("Llama", {"head_dim": 10}),
    "gemma2": (
        "Gemma2",
        GEMMA | {"num_hidden_layers": 4, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5},
    ),
    "gemma2 without caps": ("Gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 7}),
    "gemma3 with scalings of both kinds of layer": (
        "Gemma3",
        GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA_BOTH},
    ),
    "gemma3 with stretched global layers": ("Gemma3", GEMMA | {"num_hidden_layers": 4, "rope_parameters": GEMMA_ROPE}),
}


def make_pair(folder: Path, family: str, changes: dict[str, Any]) -> tuple[transformers.PreTrainedModel, Model]:
    """A random model of `transformers`, saved to `folder`, and ours loaded from there."""
    torch.manual_seed(7)
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**(SMALL | changes), attn_implementation="eager")
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # Larger than the initial values, so that every part of the model matters to the logits.
            spread = torch.randn_like(parameter)
            centre = 0.0 if family in ("Gemma2", "Gemma3") else 1.0
            parameter.copy_(centre + 0.2 * spread if "norm" in name else 0.15 * spread)
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    theirs.save_pretrained(folder)
    return theirs, load(folder)


def load(folder: Path, context: int | None = None) -> Model:
    """context: the longest that is served, where it is not the default."""
    source = ModelSource("folder", folder, "test")
    config = load_model_config(source)
    return load_model(source, config.serving(context) if context else config, "cpu", torch.float32)


def random_tokens(num_tokens: int, config: ModelConfig) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    tokens: list[int] = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator).tolist()
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_logits_and_64_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs, ours = make_pair(tmp_path, *CASES[case])
    prompt = random_tokens(40, ours.config)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    sequences = PagedSequences(ours, 2, max_len=128)
    logits = sequences.prefill(0, prompt)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(PagedSequences(ours, 1, 128).prefill(0, prompt, chunk=7), logits)
    tokens = sequences.greedy(1, prompt, 64)
    # Step by step, theirs would choose the same: after each prefix of ours, its likeliest token is ours.
    with torch.inference_mode():
        choices = theirs(torch.tensor([prompt + tokens])).logits[0, 39:-1].argmax(dim=1)
    assert tokens == choices.tolist()


@pytest.mark.parametrize(
    ("case", "sums"),
    [
        ("qwen3", 6),
        ("llama with biases and tied embeddings", 6),
        # Norms behind the products, and experts, leave sums to the norms.
        ("gemma3", 0),
        ("mixtral", 0),
        ("deepseek-v2-lite", 0),
    ],
)
def test_products_that_add_to_the_residual_themselves_give_the_same_logits(
    case: str, sums: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = make_pair(tmp_path, *CASES[case])
    prompt = random_tokens(40, ours.config)
    expected = PagedSequences(ours, 1, 128).prefill(0, prompt)
    added = unittest.mock.Mock(wraps=api.linear_add)
    monkeypatch.setattr(api, "adds_within", lambda _rows, _weight: True)
    monkeypatch.setattr(api, "linear_add", added)
    logits = PagedSequences(ours, 1, 128).prefill(0, prompt)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert added.call_count == sums


def test_weights_in_bfloat16_are_used_as_they_are(tmp_path: Path) -> None:
    theirs, _ = make_pair(tmp_path, "Llama", {})
    theirs.bfloat16().save_pretrained(tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load(tmp_path)
    assert ours.config.dtype == "bfloat16"
    prompt = random_tokens(20, ours.config)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(PagedSequences(ours, 1, 32).prefill(0, prompt), expected, rtol=1e-4, atol=1e-4)


def test_sharded_checkpoint_loads_like_a_whole_one(tmp_path: Path) -> None:
    theirs, whole = make_pair(tmp_path / "whole", "Llama", {})
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    prompt = random_tokens(10, whole.config)
    logits = [PagedSequences(model, 1, 16).prefill(0, prompt) for model in (whole, load(tmp_path / "shards"))]
    assert torch.equal(*logits)


def test_positions_past_the_old_context_follow_yarn(tmp_path: Path) -> None:
    theirs, ours = make_pair(tmp_path, "Llama", {"rope_parameters": YARN | {"rope_theta": 10000.0}})
    assert ours.config.max_position_embeddings == 128
    prompt = random_tokens(120, ours.config)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(PagedSequences(ours, 1, 128).prefill(0, prompt), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rope", "context", "length"),
    [
        # Sequences within the old context, served by an engine whose context ends there, and longer ones.
        (LONGROPE, 64, 50),
        (LONGROPE, 128, 100),
        # The base that suits sequences of just the longest length.
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 128, 100),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 300, 300),
    ],
)
def test_the_context_served_chooses_the_frequencies_of_transformers(
    tmp_path: Path, rope: dict[str, Any], context: int, length: int
) -> None:
    theirs, _ = make_pair(tmp_path, "Llama", {"rope_parameters": rope})
    prompt = random_tokens(length, load(tmp_path).config)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    logits = PagedSequences(load(tmp_path, context), 1, context).prefill(0, prompt, chunk=33)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
