# SPDX-License-Identifier: MIT
"""Mixtures of experts: real weights copied into equal and unequal experts, packed files, two ranks, one engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.reference import load_reference
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource, embedded_model_path
from tokenspeed.models import Model, load_model
from tokenspeed.models.testing import PagedSequences, logits_of_two_ranks

NUM_EXPERTS = 4
NUM_LAYERS = 8
"""Of the noisy SmolLM2: two float32 copies of all thirty would not fit beside each other."""
PROMPT = [504, 3575, 282, 4649, 314, 260, 2000, 1235, 6330, 30, 198, 1, 9690, 198]

Q4_0, Q5_1, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q5_1", "Q8_0"))
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 12},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
}


def load(source: ModelSource) -> Model:
    return load_model(source, load_model_config(source), "cpu", torch.float32)


def folder_model(folder: Path) -> Model:
    return load(ModelSource("folder", folder, "test"))


def random_model(family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**(SMALL | FAMILIES[family]), attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if "norm" not in name else 0.1) + ("norm" in name))
    return model


def with_equal_experts(path: Path, out: Path) -> Path:
    """The embedded model's file as Mixtral's: its feed-forward weights, packed as they are, in every expert."""
    reader = gguf.GGUFReader(str(path))
    writer = gguf.GGUFWriter(out, "llama")
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            writer.add_key_value(key, field.contents(), field.types[0])
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(2)
    random = np.random.default_rng(3)
    for tensor in reader.tensors:
        name, data = tensor.name, tensor.data
        if any(part in name for part in ("ffn_gate", "ffn_up", "ffn_down")):
            name, data = name.replace(".weight", "_exps.weight"), np.stack([data] * NUM_EXPERTS)
        writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
        if "ffn_norm" in name:
            router = random.standard_normal((NUM_EXPERTS, data.shape[0])).astype(np.float32)
            writer.add_tensor(name.replace("ffn_norm", "ffn_gate_inp"), router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_equal_experts_give_the_logits_of_the_dense_model(tmp_path: Path) -> None:
    path = embedded_model_path()
    expected = PagedSequences(load(ModelSource("gguf", path, "embedded")), 1, 32).prefill(0, PROMPT)
    file = with_equal_experts(path, tmp_path / "m.gguf")
    logits = PagedSequences(load(ModelSource("gguf", file, "test")), 1, 32).prefill(0, PROMPT)
    # The two experts' weights add up to 1 but for rounding.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    assert torch.equal(logits.argmax(dim=1), expected.argmax(dim=1))


def noisy_smollm2(folder: Path) -> transformers.MixtralForCausalLM:
    """SmolLM2's first layers as a Mixtral whose experts differ from each other by a tenth, saved in shards."""
    dense = load_reference(embedded_model_path())
    values = dense.config.to_dict() | {"num_hidden_layers": NUM_LAYERS, "num_local_experts": NUM_EXPERTS}
    wanted = transformers.MixtralConfig().to_dict().keys() - {"architectures", "model_type"}
    config = transformers.MixtralConfig(
        **{key: value for key, value in values.items() if key in wanted}, num_experts_per_tok=2
    )
    model = transformers.MixtralForCausalLM._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(NUM_EXPERTS, *weight.shape, generator=generator)
        return weight + 0.1 * weight.std() * noise

    with torch.no_grad():
        state = dict(dense.named_parameters())
        for name, parameter in model.named_parameters():
            if name in state:
                parameter.copy_(state[name])
        for layer, source in zip(model.model.layers, dense.model.layers, strict=False):
            experts = layer.mlp.experts
            experts.gate_up_proj.copy_(noisy(torch.cat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight])))
            experts.down_proj.copy_(noisy(source.mlp.down_proj.weight))
            layer.mlp.gate.weight.copy_(torch.randn(layer.mlp.gate.weight.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size="200MB")
    return model


def test_noisy_experts_of_a_real_model_equal_transformers_and_64_greedy_tokens(tmp_path: Path) -> None:
    theirs = noisy_smollm2(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = folder_model(tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    sequences = PagedSequences(ours, 2, 128)
    torch.testing.assert_close(sequences.prefill(0, PROMPT), expected, rtol=0, atol=2e-3)
    tokens = sequences.greedy(1, PROMPT, 64)
    with torch.inference_mode():
        logits = theirs(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    best, chosen = logits.amax(dim=1), logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    # Where the two likeliest logits are this close, the order of float32 sums decides.
    assert (best - chosen).max() < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    # Inner columns that do not divide.
    monkeypatch.setitem(SMALL, "intermediate_size", 95)
    random_model(family).save_pretrained(tmp_path)
    alone = PagedSequences(folder_model(tmp_path), 1, 16)
    prompt = [5, 9, 33, 1, 60, 7, 7, 2]
    expected = torch.cat([alone.prefill(0, prompt), alone.step([(0, [11])])[0]])
    for _, logits in logits_of_two_ranks(tmp_path, prompt, 11):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_row_has_the_same_bits_alone_in_chunks_and_in_a_mixed_batch(tmp_path: Path, family: str) -> None:
    random_model(family).save_pretrained(tmp_path)
    model = folder_model(tmp_path)
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, 96, (3, 60), generator=generator).tolist()
    alone = PagedSequences(model, 1, 64)
    whole, after = alone.prefill(0, prompts[0]), alone.step([(0, [5])])[0]
    mixed = PagedSequences(model, 3, 64)
    mixed.prefill(1, prompts[1][:30])
    assert torch.equal(mixed.step([(1, [4]), (0, prompts[0][:21])])[1], whole[:21])
    assert torch.equal(mixed.step([(1, [9]), (0, prompts[0][21:]), (2, prompts[2])])[1], whole[21:])
    assert torch.equal(mixed.step([(2, [1]), (0, [5]), (1, [2])])[1], after)


def write_qwen3_moe(model: transformers.PreTrainedModel, out: Path) -> transformers.PreTrainedModel:
    """A GGUF file of the model with packed experts, gate and up in different formats; returns what it holds."""
    config = model.config
    writer = gguf.GGUFWriter(out, "qwen3moe")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)

    def packed(name: str, weight: torch.Tensor, kind: gguf.GGMLQuantizationType) -> None:
        data = gguf.quantize(weight.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        weight.copy_(torch.from_numpy(gguf.dequantize(data, kind)))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight, parts = parameter.detach(), name.removesuffix(".weight").split(".")
            if "experts" not in parts:
                layer = f"blk.{parts[2]}." if "layers" in parts else ""
                writer.add_tensor(f"{layer}{_GGUF_NAMES[parts[-1]]}.weight", weight.numpy())
            elif parts[-1] == "down_proj":
                packed(f"blk.{parts[2]}.ffn_down_exps.weight", weight, Q5_1)
            else:
                gate, up = weight.chunk(2, dim=1)
                packed(f"blk.{parts[2]}.ffn_gate_exps.weight", gate, Q4_0)
                packed(f"blk.{parts[2]}.ffn_up_exps.weight", up, Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate_inp",
}


def test_packed_experts_of_a_gguf_file_equal_transformers_on_their_values(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    theirs = write_qwen3_moe(random_model("Qwen3Moe"), file)
    prompt = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    logits = PagedSequences(load(ModelSource("gguf", file, "test")), 1, 64).prefill(0, prompt)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    model = random_model("Mixtral")
    model.config.num_local_experts = 5
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"block_sparse_moe\.experts\.4\.w1\.weight' is missing"):
        folder_model(tmp_path)


def to_mxfp4(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Rewrites the saved model's experts as random mxfp4 blocks and scales, and gives the model their values."""
    generator = torch.Generator().manual_seed(9)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([numbers, -numbers])
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, columns, rows = parameter.shape
        blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        values = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], dim=-1).flatten(-2)
        values = values * 2.0 ** (scales.float() - 127)[..., None]
        with torch.no_grad():
            parameter.copy_(values.flatten(2).transpose(1, 2))
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def test_experts_in_mxfp4_equal_transformers_on_their_values(tmp_path: Path) -> None:
    theirs = random_model("GptOss")
    theirs.save_pretrained(tmp_path)
    to_mxfp4(theirs, tmp_path)
    prompt = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(6)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    logits = PagedSequences(folder_model(tmp_path), 1, 64).prefill(0, prompt)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
