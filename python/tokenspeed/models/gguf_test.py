# SPDX-License-Identifier: MIT
"""GGUF files of DeepSeek, gpt-oss and Mixtral, as converters write them, against `transformers` on what they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import ModelSource
from tokenspeed.models import load_model
from tokenspeed.models.testing import PagedSequences

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
Tensors = dict[str, torch.Tensor]


def random_model(family: str, seed: int = 3, **values: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(COMMON | values))
    model: transformers.PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.copy_(torch.randn_like(tensor) * (0.1 if "norm" in name else 0.2) + ("norm" in name))
    return model


def renamed(model: transformers.PreTrainedModel, special: Callable[[str, torch.Tensor], Tensors | None]) -> Tensors:
    """The model's tensors by the names of the format. special: those that are not only called otherwise."""
    out: Tensors = {}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module in TOP:
            out[f"{TOP[module]}.{kind}"] = tensor
            continue
        _, _, number, part = name.split(".", 3)
        found = special(part, tensor)
        if found is None:
            found = {f"{LAYER[part.rpartition('.')[0]]}.{kind}": tensor}
        out.update({f"blk.{number}.{theirs}": value for theirs, value in found.items()})
    return out


def write(path: Path, architecture: str, metadata: dict[str, Any], tensors: Tensors, packed: dict[str, Any]) -> None:
    """packed: the type of tensors whose names end so."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        kind = next((kind for ending, kind in packed.items() if name.endswith(ending)), None)
        data = tensor.contiguous().float().numpy()
        if kind is None:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def common_metadata(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10000.0,
    }


def assert_like_transformers(path: Path, theirs: transformers.PreTrainedModel, architecture: str) -> None:
    source = ModelSource("gguf", path, "test")
    config = load_model_config(source)
    assert config.architecture == architecture
    prompt = torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    sequences = PagedSequences(load_model(source, config, "cpu", torch.float32), 1, 64)
    torch.testing.assert_close(sequences.prefill(0, prompt, chunk=25), expected, rtol=1e-4, atol=1e-4)


# Keys and values of all heads in one tensor; apart, as newer converters write them; and all three.
@pytest.mark.parametrize("form", ["together", "apart", "both"])
@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
def test_deepseek(family: str, form: str, tmp_path: Path) -> None:
    third = family == "DeepseekV3"
    groups = {"n_group": 4, "topk_group": 2, "q_lora_rank": 24} if third else {"q_lora_rank": None}
    theirs = random_model(family, **LATENT, **groups, rope_parameters=dict(DEEPSEEK_YARN))
    config = theirs.config

    def special(part: str, tensor: torch.Tensor) -> Tensors | None:
        if part == "mlp.gate.e_score_correction_bias":
            return {"exp_probs_b.bias": tensor}
        if part == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
        if part == "mlp.experts.down_proj":
            return {"ffn_down_exps.weight": tensor}
        if part == "self_attn.kv_b_proj.weight" and form != "together":
            keys, values = tensor.view(4, 16 + 32, 32).split([16, 32], dim=1)
            apart = {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": values}
            return apart | ({"attn_kv_b.weight": tensor} if form == "both" else {})
        return None

    metadata = common_metadata(config) | {
        "attention.kv_lora_rank": 32,
        "rope.dimension_count": 16,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.yarn_log_multiplier": 0.07,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": third,
        "expert_gating_func": 2 if third else 1,
        "leading_dense_block_count": 1,
    }
    if third:
        metadata |= {"attention.q_lora_rank": 24, "expert_group_count": 4, "expert_group_used_count": 2}
    if form == "together":
        metadata |= {"attention.key_length": 32, "attention.value_length": 32}
    else:
        metadata |= {"attention.key_length": 48, "attention.value_length": 32, "attention.head_count_kv": 1}
        metadata |= {"attention.key_length_mla": 32, "attention.value_length_mla": 32}
    path = tmp_path / "m.gguf"
    write(path, "deepseek2", metadata, renamed(theirs, special), {})
    assert_like_transformers(path, theirs, f"{family}ForCausalLM")


def test_a_file_of_two_and_three_bits_with_others_among_them(tmp_path: Path) -> None:
    theirs = random_model("Qwen2", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    # As converters mix them: types differ within what is one product here.
    kinds = {"attn_q": "Q2_K", "attn_k": "Q3_K", "attn_v": "Q8_0", "ffn_gate": "Q2_K", "ffn_down": "Q3_K"}
    kinds |= {"attn_output": "Q3_K", "ffn_up": "Q3_K", "token_embd": "Q2_K", "output": "Q3_K"}
    path, random = tmp_path / "m.gguf", np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in common_metadata(theirs.config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"qwen2.{key}", value)
    for name, tensor in renamed(theirs, lambda part, _: None).items():
        module = name.split(".")[-2]
        if module not in kinds or tensor.ndim == 1:
            writer.add_tensor(name, tensor.float().numpy())
            continue
        kind = gguf.GGMLQuantizationType[kinds[module]]
        if kind == gguf.GGMLQuantizationType.Q8_0:
            data = gguf.quantize(tensor.contiguous().numpy(), kind)
        else:  # the package cannot quantise to these: any bytes behind small scales
            num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            blocks = random.integers(0, 256, (tensor.numel() // num_values, num_bytes), np.uint8)
            count = 2 if kinds[module] == "Q2_K" else 1
            scale = random.normal(0, 0.005 if count == 2 else 0.001, (len(blocks), count)).astype(np.float16)
            blocks[:, -2 * count :] = scale.view(np.uint8)
            data = blocks.reshape(tensor.shape[0], -1)
        writer.add_tensor(name, data, raw_dtype=kind)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.array(gguf.dequantize(data, kind))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_like_transformers(path, theirs, "Qwen2ForCausalLM")


@pytest.mark.parametrize("experts", ["dense", "mxfp4", "q8_0"])
def test_gpt_oss(experts: str, tmp_path: Path) -> None:
    kind = None if experts == "dense" else gguf.GGMLQuantizationType[experts.upper()]
    theirs = random_model(
        "GptOss",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        rope_parameters=YARN | {"truncate": False},
    )

    def as_stored(weight: torch.Tensor) -> torch.Tensor:
        if kind is None:
            return weight
        data = gguf.quantize(weight.contiguous().numpy(), kind)
        return torch.from_numpy(np.array(gguf.dequantize(data, kind)))

    with torch.no_grad():
        for layer in theirs.model.layers:
            parts = layer.mlp.experts
            for start in (0, 1):
                half = parts.gate_up_proj[:, :, start::2].transpose(1, 2)
                parts.gate_up_proj[:, :, start::2] = as_stored(half).transpose(1, 2)
            parts.down_proj.copy_(as_stored(parts.down_proj.transpose(1, 2)).transpose(1, 2))

    def special(part: str, tensor: torch.Tensor) -> Tensors | None:
        if part == "post_attention_layernorm.weight":
            return {"post_attention_norm.weight": tensor}
        if part == "self_attn.sinks":
            return {"attn_sinks.weight": tensor}
        if part == "mlp.experts.gate_up_proj":
            outputs_first = tensor.transpose(1, 2)
            return {"ffn_gate_exps.weight": outputs_first[:, 0::2], "ffn_up_exps.weight": outputs_first[:, 1::2]}
        if part == "mlp.experts.gate_up_proj_bias":
            return {"ffn_gate_exps.bias": tensor[:, 0::2], "ffn_up_exps.bias": tensor[:, 1::2]}
        if part == "mlp.experts.down_proj":
            return {"ffn_down_exps.weight": tensor.transpose(1, 2)}
        if part == "mlp.experts.down_proj_bias":
            return {"ffn_down_exps.bias": tensor}
        return None

    metadata = common_metadata(theirs.config) | {
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 24,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    path = tmp_path / "m.gguf"
    packed = {} if kind is None else dict.fromkeys(("gate_exps.weight", "up_exps.weight", "down_exps.weight"), kind)
    write(path, "gpt-oss", metadata, renamed(theirs, special), packed)
    assert_like_transformers(path, theirs, "GptOssForCausalLM")


def test_mixtral_with_a_tensor_an_expert(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    theirs = random_model("Mixtral", num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope)

    def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
        return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    def special(part: str, tensor: torch.Tensor) -> Tensors | None:
        if part == "self_attn.q_proj.weight":
            return {"attn_q.weight": permuted(tensor, 4)}
        if part == "self_attn.k_proj.weight":
            return {"attn_k.weight": permuted(tensor, 2)}
        if part.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            return {f"ffn_gate.{i}.weight": gate[i] for i in range(4)} | {f"ffn_up.{i}.weight": up[i] for i in range(4)}
        if part.endswith("experts.down_proj"):
            return {f"ffn_down.{i}.weight": tensor[i] for i in range(4)}
        return None

    path = tmp_path / "m.gguf"
    metadata = common_metadata(theirs.config) | {"expert_count": 4, "expert_used_count": 2}
    write(path, "llama", metadata, renamed(theirs, special), {})
    assert_like_transformers(path, theirs, "MixtralForCausalLM")
