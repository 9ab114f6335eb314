# SPDX-License-Identifier: MIT
"""Model configurations from config.json and GGUF metadata, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tokenspeed.config.gguf import read_gguf
from tokenspeed.config.latent import LatentConfig
from tokenspeed.config.model import config_from_gguf, load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource, embedded_model_path
from tokenspeed.config.moe import MoEConfig
from tokenspeed.config.testing import DEEPSEEK, GEMMA, LLAMA, MIXTRAL, folder_with


def test_llama_config_json(tmp_path: Path) -> None:
    config = load_model_config(folder_with(tmp_path, LLAMA))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (4, 2, 16, 16)
    assert (config.rope_theta, config.rms_norm_eps, config.dtype) == (500000.0, 1e-5, "bfloat16")
    assert config.eos_token_ids == (7, 8)
    assert config.windows == (0, 0)
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)
    assert not config.tie_word_embeddings


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    source = folder_with(tmp_path, LLAMA | {"eos_token_id": 7})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_model_config(source).eos_token_ids == (7, 9)


def test_new_spelling_of_rope_is_read(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    values["rope_parameters"] = rope | {"original_max_position_embeddings": 64}
    config = load_model_config(folder_with(tmp_path, values))
    assert config.rope_theta == 1e6
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.original_max_position_embeddings) == ("llama3", 64)
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"type": "su", "original_max_position_embeddings": 64, "short_factor": [1] * 8, "long_factor": [2] * 8}, 512),
        ({"rope_type": "default"}, 512),
    ],
)
def test_scaling_extends_the_context(tmp_path: Path, scaling: dict[str, Any], context: int) -> None:
    config = load_model_config(folder_with(tmp_path, LLAMA | {"rope_scaling": scaling}))
    assert config.max_position_embeddings == context


def test_only_dynamic_scaling_serves_more_than_the_declared_context_when_asked(tmp_path: Path) -> None:
    for kind, longest in (("dynamic", 2048), ("linear", 2048), ("default", 512)):
        scaling = {"rope_type": kind, "factor": 4.0}
        config = load_model_config(folder_with(tmp_path, LLAMA | {"rope_scaling": scaling}))
        assert config.longest_context == longest
        assert config.max_position_embeddings == (2048 if kind == "linear" else 512)
        assert config.serving(700).max_position_embeddings == 700


def test_old_context_of_phi3_stands_beside_the_scaling(tmp_path: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    change = {"rope_scaling": scaling, "original_max_position_embeddings": 128}
    config = load_model_config(folder_with(tmp_path, LLAMA | change))
    assert config.rope_scaling is not None
    assert (config.rope_scaling.original_max_position_embeddings, config.rope_scaling.factor) == (128, 4.0)
    assert config.rope_scaling.divisors(128) == (1.0,) * 8
    assert config.rope_scaling.divisors(129) == (4.0,) * 8


def test_members_of_the_family_differ_in_biases_norms_and_windows(tmp_path: Path) -> None:
    qwen2 = load_model_config(folder_with(tmp_path, LLAMA | {"architectures": ["Qwen2ForCausalLM"]}))
    assert qwen2.qkv_bias
    assert not qwen2.output_bias
    qwen3 = load_model_config(folder_with(tmp_path, LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}))
    assert qwen3.qk_norm
    assert qwen3.head_dim == 32
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 128}
    assert load_model_config(folder_with(tmp_path, LLAMA | mistral)).windows == (128, 128)
    windowed = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}
    for use, windows in ((True, (0, 64)), (False, (0, 0))):
        config = load_model_config(folder_with(tmp_path, LLAMA | windowed | {"use_sliding_window": use}))
        assert config.windows == windows


def test_gemma3_interleaves_windows_and_rotary_bases(tmp_path: Path) -> None:
    old = GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 5000.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
    new = {key: value for key, value in GEMMA.items() if key != "rope_theta"} | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        }
    }
    configs = [load_model_config(folder_with(tmp_path, values)) for values in (old, new)]
    assert configs[0] == configs[1]
    config = configs[0]
    assert config.windows == (32, 32, 32, 32, 32, 0, 32)
    assert (config.rope_theta, config.windowed_rope_theta) == (1e6, 5000.0)
    assert config.rope_scaling is not None
    assert config.max_position_embeddings == 512
    assert (config.attention_scale, config.norm_offset, config.activation) == (0.125, 1.0, "gelu_tanh")
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "caps"),
    [
        ({}, (50.0, 30.0)),
        ({"attn_logit_softcapping": None, "final_logit_softcapping": 20}, (0.0, 20.0)),
    ],
)
def test_gemma2_alternates_windows_and_has_soft_caps(
    tmp_path: Path, change: dict[str, Any], caps: tuple[float, float]
) -> None:
    config = load_model_config(folder_with(tmp_path, GEMMA | {"architectures": ["Gemma2ForCausalLM"]} | change))
    assert config.windows == (32, 0, 32, 0, 32, 0, 32)
    assert (config.attention_softcap, config.logits_softcap) == caps
    assert (config.windowed_rope_theta, config.qk_norm, config.norm_offset) == (None, False, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": None}, "'architectures' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization 'aqlm' is not supported"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "3-bit gptq weights are not supported"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}},
            "gptq checkpoint_format 'marlin' is not supported",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "awq version 'gemv'"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope scaling 'axial' is not supported"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "'mrope_section' .* is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1]}}, "needs a list 'short_factor'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1] * 8, "short_factor": [1]}},
            "longrope has 1 factors for 8 rotary frequencies",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs a number 'low_freq_factor'"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"vocab_size": "many"}, "'vocab_size' must be a positive whole number"),
        ({"num_key_value_heads": 3}, "4 heads do not divide among 3 KV heads"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["sliding_attention"], "sliding_window": 8},
            "layer_types has 1 entries for 2 layers",
        ),
        ({"layer_types": ["chunked_attention"] * 2}, "'layer_types' must be a list of 'full_attention' and"),
        ({"num_attention_heads": 5}, "hidden size 64 does not divide among 5 heads"),
        ({"head_dim": 15}, "rotary size 15 must be even"),
    ],
)
def test_unsupported_and_broken_configs_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = folder_with(tmp_path, LLAMA | change)
    with pytest.raises(ModelError, match=message) as raised:
        load_model_config(source)
    assert str(raised.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(raised.value)


def test_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="not JSON"):
        load_model_config(ModelSource("folder", tmp_path, "test"))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        load_model_config(ModelSource("folder", tmp_path, "test"))


def test_embedded_model_is_the_llama_of_its_card() -> None:
    config = load_model_config(ModelSource("gguf", embedded_model_path(), "embedded"))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 8192
    assert config.rope_theta == 100000.0
    assert config.eos_token_ids == (2,)


def test_experts_of_mixtral_and_qwen3_moe_and_gpt_oss(tmp_path: Path) -> None:
    mixtral = load_model_config(folder_with(tmp_path, MIXTRAL)).moe
    assert mixtral == MoEConfig(8, 2, 96, (True, True))
    qwen = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4}
    qwen |= {"moe_intermediate_size": 24, "decoder_sparse_step": 2}
    assert load_model_config(folder_with(tmp_path, qwen)).moe == MoEConfig(16, 4, 24, (False, True), renormalize=False)
    assert load_model_config(folder_with(tmp_path, LLAMA)).moe is None
    oss = MIXTRAL | {"architectures": ["GptOssForCausalLM"], "sliding_window": 128, "attention_bias": True}
    config = load_model_config(folder_with(tmp_path, oss))
    assert config.moe == MoEConfig(8, 2, 96, (True, True), router_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0)
    assert (config.attention_sinks, config.windows, config.qkv_bias, config.output_bias) == (True, (128, 0), True, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": None}, "'num_local_experts' is missing"),
        ({"num_experts_per_tok": "two"}, "'num_experts_per_tok' must be a positive whole number"),
        ({"num_experts_per_tok": 9}, "9 experts a token cannot be chosen from 8"),
    ],
)
def test_experts_that_cannot_be_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model_config(folder_with(tmp_path, MIXTRAL | change))


DEEPSEEK_V2 = DEEPSEEK | {"architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "softmax", "topk_method": None}


def test_deepseek_has_latent_sizes_and_grouped_experts(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    v3 = load_model_config(folder_with(tmp_path, DEEPSEEK | {"rope_scaling": scaling}))
    assert v3.latent == LatentConfig(24, 32, 24, 16, 48, interleaved=True)
    assert (v3.head_dim, v3.rotary_dim, v3.num_kv_heads, v3.num_extra_layers) == (40, 16, 4, 1)
    # Both q and k carry yarn's 0.1 ln(40) + 1.
    assert v3.attention_scale == pytest.approx(40**-0.5 * 1.3688879454113936**2)
    assert v3.moe == MoEConfig(
        16,
        3,
        32,
        (False, True),
        scores="sigmoid",
        scale=2.5,
        num_groups=4,
        top_groups=2,
        group_score="best_two",
        correction_bias="e_score_correction_bias",
        float32_router=True,
        shared_intermediate_size=64,
    )
    lite = load_model_config(folder_with(tmp_path, DEEPSEEK_V2 | {"q_lora_rank": None, "moe_layer_freq": 2}))
    assert lite.latent is not None and lite.latent.query_rank is None
    assert lite.moe is not None
    assert (lite.moe.scores, lite.moe.renormalize, lite.moe.num_groups) == ("softmax", False, 1)
    assert lite.moe.sparse_layers == (False, False)
    grouped = load_model_config(folder_with(tmp_path, DEEPSEEK_V2 | {"topk_method": "group_limited_greedy"}))
    assert grouped.moe is not None and (grouped.moe.num_groups, grouped.moe.group_score) == (4, "best")
    dense = load_model_config(folder_with(tmp_path, DEEPSEEK | {"n_routed_experts": None}))
    assert dense.moe is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": -40}, "'kv_lora_rank' must be a positive whole number, got -40"),
        ({"v_head_dim": None}, "'v_head_dim' must be a positive whole number, got None"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"n_group": 3}, "16 experts in 3 groups"),
        ({"topk_group": 5}, "of which 5 are chosen"),
        ({"num_experts_per_tok": 9}, "2 groups of 4 experts are too few for 9 a token"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
    ],
)
def test_deepseek_that_we_cannot_run_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model_config(folder_with(tmp_path, DEEPSEEK | change))


def test_sizes_of_latents_that_gpus_lack_are_refused_there_by_name(tmp_path: Path) -> None:
    latent = load_model_config(folder_with(tmp_path, DEEPSEEK)).latent
    assert latent is not None
    latent.check_registers()
    odd = load_model_config(folder_with(tmp_path, DEEPSEEK | {"qk_rope_head_dim": 8})).latent
    assert odd is not None
    with pytest.raises(ModelError, match="qk_rope_head_dim 8 is not supported on a GPU"):
        odd.check_registers()


def write_gguf(path: Path, architecture: str, extra: Mapping[str, int | float | str], tensors: tuple[str, ...]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
    }.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_uint32(f"{architecture}.attention.head_count", 2)
    for key, entry in extra.items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(entry)]
        add(key, entry)
    for name in tensors:
        writer.add_tensor(name, np.array([1.0, 2.0, 4.0, 8.0], np.float32).reshape(2, 2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_says_the_rest_by_its_tensors(tmp_path: Path) -> None:
    names = ("token_embd.weight", "output.weight", "blk.0.attn_q.bias", "rope_freqs.weight")
    extra = {"qwen2.attention.key_length": 24, "tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6}
    config = config_from_gguf(read_gguf(write_gguf(tmp_path / "m.gguf", "qwen2", extra, names)))
    assert config.architecture == "Qwen2ForCausalLM"
    assert config.vocab_size == 2
    assert config.qkv_bias
    assert not config.tie_word_embeddings
    assert config.head_dim == 24
    assert config.num_kv_heads == 2
    assert config.eos_token_ids == (5, 6)
    assert config.rope_scaling is not None
    assert config.rope_scaling.frequency_divisors == (1.0, 2.0, 4.0, 8.0)


def test_gguf_gemma3_has_its_windows_and_norms_with_the_offset_added(tmp_path: Path) -> None:
    extra = {"gemma3.attention.sliding_window": 512, "gemma3.attention.key_length": 256}
    config = config_from_gguf(read_gguf(write_gguf(tmp_path / "m.gguf", "gemma3", extra, ("token_embd.weight",))))
    assert config.architecture == "Gemma3ForCausalLM"
    assert config.windows == (512,)
    assert (config.windowed_rope_theta, config.norm_offset, config.attention_scale) == (10000.0, 0.0, 0.0625)


@pytest.mark.parametrize(("prefix", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_gguf_file_of_a_27b_scales_queries_by_another_size_than_the_head(
    tmp_path: Path, prefix: str, num_layers: int
) -> None:
    own = {"block_count": num_layers, "embedding_length": 288, "attention.head_count": 2, "attention.key_length": 128}
    extra: dict[str, int | float | str] = {f"{prefix}.{key}": value for key, value in own.items()}
    for layers, scaled_by in ((num_layers, 144), (num_layers + 1, 128)):
        extra[f"{prefix}.block_count"] = layers
        config = config_from_gguf(read_gguf(write_gguf(tmp_path / "m.gguf", prefix, extra, ("token_embd.weight",))))
        assert config.attention_scale == scaled_by**-0.5


def test_gguf_gemma2_has_caps_and_windows_though_the_file_says_none(tmp_path: Path) -> None:
    config = config_from_gguf(read_gguf(write_gguf(tmp_path / "m.gguf", "gemma2", {}, ("token_embd.weight",))))
    assert (config.architecture, config.attention_softcap, config.logits_softcap) == ("Gemma2ForCausalLM", 50.0, 30.0)
    assert config.windows == (4096,)
    said = {"gemma2.attn_logit_softcapping": 9.0, "gemma2.attention.sliding_window": 7}
    config = config_from_gguf(read_gguf(write_gguf(tmp_path / "m.gguf", "gemma2", said, ("token_embd.weight",))))
    assert (config.attention_softcap, config.logits_softcap, config.windows) == (9.0, 30.0, (7,))


def test_gguf_with_experts_is_mixtral_or_qwen3_moe(tmp_path: Path) -> None:
    for prefix, architecture, inner in (
        ("llama", "MixtralForCausalLM", 64),
        ("qwen3moe", "Qwen3MoeForCausalLM", 48),
    ):
        extra = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48}
        keys = {f"{prefix}.{key}": value for key, value in extra.items()}
        config = config_from_gguf(read_gguf(write_gguf(tmp_path / "m.gguf", prefix, keys, ("token_embd.weight",))))
        assert config.architecture == architecture
        assert config.moe == MoEConfig(8, 2, inner, (True,))


def test_gguf_yarn(tmp_path: Path) -> None:
    extra: dict[str, int | float | str] = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 256,
    }
    config = config_from_gguf(read_gguf(write_gguf(tmp_path / "m.gguf", "llama", extra, ("token_embd.weight",))))
    assert config.max_position_embeddings == 1024


@pytest.mark.parametrize(
    ("architecture", "extra", "tensors", "message"),
    [
        ("mamba", {}, ("token_embd.weight",), "architecture 'mamba' .* is not supported"),
        ("llama", {}, (), "'token_embd.weight' is missing"),
        ("qwen2", {"qwen2.expert_count": 8}, ("token_embd.weight",), "qwen2 with experts"),
        ("llama", {"llama.expert_count": 8}, ("token_embd.weight",), "'expert_used_count' is missing"),
        (
            "llama",
            {"llama.expert_count": 2, "llama.expert_used_count": 3},
            ("token_embd.weight",),
            "3 experts a token cannot be chosen from 2",
        ),
        ("llama", {"split.count": 3}, ("token_embd.weight",), "merge the parts"),
        (
            "llama",
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            ("token_embd.weight",),
            "rope scaling 'longrope'",
        ),
    ],
)
def test_unsupported_gguf_files_are_refused_by_name(
    tmp_path: Path, architecture: str, extra: Mapping[str, int | float | str], tensors: tuple[str, ...], message: str
) -> None:
    file = read_gguf(write_gguf(tmp_path / "m.gguf", architecture, extra, tensors))
    with pytest.raises(ModelError, match=message) as raised:
        config_from_gguf(file)
    assert str(raised.value).startswith(str(tmp_path / "m.gguf"))


def test_overrides_stand_in_for_values_of_config_json_and_are_remembered(tmp_path: Path) -> None:
    source = folder_with(tmp_path, LLAMA)
    plain = load_model_config(source)
    changes = {"max_position_embeddings": 300, "rms_norm_eps": 0.5, "rope_parameters": {"rope_theta": 7.0}}
    changed = load_model_config(source, changes)
    assert (changed.max_position_embeddings, changed.rms_norm_eps, changed.rope_theta) == (300, 0.5, 7.0)
    assert changed.hidden_size == plain.hidden_size and (plain.overrides, changed.overrides) == ({}, changes)
    with pytest.raises(ModelError, match="FooForCausalLM is not supported"):
        load_model_config(source, {"architectures": ["FooForCausalLM"]})


def test_a_gguf_file_has_nothing_to_override() -> None:
    source = ModelSource("gguf", embedded_model_path(), "test")
    with pytest.raises(ModelError, match=r"--hf-overrides stand in for values of a config\.json"):
        load_model_config(source, {"rope_theta": 1.0})


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "fp8"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
    ],
)
def test_older_tools_leave_the_quantization_in_a_file_of_its_own(
    tmp_path: Path, name: str, content: dict[str, Any], kind: str
) -> None:
    source = folder_with(tmp_path, LLAMA)
    (tmp_path / name).write_text(json.dumps(content))
    quantization = load_model_config(source).quantization
    assert quantization is not None and [group.kind for group in quantization.groups] == [kind]
