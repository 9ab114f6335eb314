# SPDX-License-Identifier: MIT
"""DeepSeek beside what `transformers_test` compares: ranks, bits in any batch, cache sizes, surplus layers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.quantized import SCHEMES, quantize_folder
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.layers.cache import total_block_bytes
from tokenspeed.models import KVFormat, LoadOptions, Model, load_model
from tokenspeed.models.testing import PagedSequences, logits_of_two_ranks
from tokenspeed.parallel import Group

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2": {"q_lora_rank": None, "n_shared_experts": 2},
    "DeepseekV3": {"q_lora_rank": 32, "n_shared_experts": 1},
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small random model's checkpoint."""
    torch.manual_seed(11)
    family: str = request.param
    config = getattr(transformers, f"{family}Config")(**(SMALL | FAMILIES[family]))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.copy_(torch.randn_like(tensor) * (0.1 if "norm" in name else 0.2) + ("norm" in name))
    model.save_pretrained(tmp_path)
    return tmp_path


def load(
    folder: Path, load_format: str = "auto", group: Group | None = None, options: LoadOptions | None = None
) -> Model:
    source = ModelSource("folder", folder, "test")
    config = load_model_config(source)
    return load_model(source, config, "cpu", torch.float32, load_format, group=group, options=options)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]


def test_two_ranks_give_the_logits_of_one_and_each_holds_the_whole_latent(folder: Path) -> None:
    model = load(folder)
    alone = PagedSequences(model, 1, 16)
    prompt = prompts(8)[0]
    expected = torch.cat([alone.prefill(0, prompt), alone.step([(0, [11])])[0]])
    for block_bytes, logits in logits_of_two_ranks(folder, prompt, 11):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert block_bytes == total_block_bytes(model.kv_cache(16))


def test_chunks_of_any_size_and_any_block_size_equal_whole_prefill(folder: Path) -> None:
    model = load(folder)
    prompt = prompts(300)[0]
    whole = PagedSequences(model, 1, 320, block_size=16).prefill(0, prompt)
    for chunk, block_size in ((1, 256), (7, 16), (64, 8), (100, 32), (129, 64), (299, 128)):
        chunked = PagedSequences(model, 1, 320, block_size).prefill(0, prompt, chunk)
        assert torch.equal(chunked, whole), f"chunks of {chunk} tokens with blocks of {block_size}"


def test_a_row_has_the_same_bits_alone_and_in_a_mixed_batch(folder: Path) -> None:
    model = load(folder)
    mine, other, third = prompts(60, 30, 50)
    alone = PagedSequences(model, 1, 64)
    whole, after = alone.prefill(0, mine), alone.step([(0, [5])])[0]
    mixed = PagedSequences(model, 3, 64)
    mixed.prefill(1, other)
    assert torch.equal(mixed.step([(1, [4]), (0, mine[:21])])[1], whole[:21])
    assert torch.equal(mixed.step([(1, [9]), (0, mine[21:]), (2, third)])[1], whole[21:])
    assert torch.equal(mixed.step([(2, [1]), (0, [5]), (1, [2])])[1], after)


def test_a_block_holds_one_latent_and_one_rotated_key_a_token(folder: Path) -> None:
    layers = load(folder, "dummy").kv_cache(8)
    assert [[tensor.block_shape for tensor in layer] for layer in layers] == [[(8, 48)]] * 3
    assert total_block_bytes(layers) == 3 * 8 * 48 * 4


def test_layers_that_predict_several_tokens_are_left_alone_and_others_are_not(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors")
    if load_model_config(ModelSource("folder", folder, "test")).num_extra_layers:
        load(folder)
        tensors["model.layers.4.eh_proj.weight"] = torch.zeros(2, 2)
        save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"eh_proj\.weight' has no place"):
        load(folder)


def test_ranks_must_divide_the_heads(folder: Path) -> None:
    with pytest.raises(ModelError, match="--tensor-parallel-size: 4 heads do not divide among 3 ranks"):
        load(folder, "dummy", Group(0, 3))


def test_fp8_in_tiles_equals_transformers_on_the_dequantised_weights(folder: Path, tmp_path: Path) -> None:
    dense = shutil.copytree(folder, tmp_path / "dense")
    meant = quantize_folder(folder, SCHEMES["fp8 in tiles"])
    assert "model.layers.1.self_attn.kv_b_proj.weight" in meant and len(meant) > 30
    save_file(load_file(dense / "model.safetensors") | meant, dense / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    prompt = prompts(60)[0]
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    logits = PagedSequences(load(folder), 1, 64).prefill(0, prompt, chunk=25)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [None, 0.02])
def test_a_smaller_cache_moves_logits_little_and_cold_equals_warm(folder: Path, factor: float | None) -> None:
    prompt = prompts(60)[0]
    want = PagedSequences(load(folder), 1, 64).prefill(0, prompt)

    def run(dtype: torch.dtype, factors: tuple[float, ...] | None, chunk: int | None = None) -> torch.Tensor:
        model = load(folder, options=LoadOptions(None, {}, KVFormat(dtype, False, factors)))
        assert [[tensor.dtype for tensor in layer] for layer in model.kv_cache(8)] == [[dtype]] * 3
        return PagedSequences(model, 1, 64).prefill(0, prompt, chunk)

    def off(logits: torch.Tensor) -> float:
        # The median: a token whose experts change on the way is far off.
        return float((logits - want).abs().median() / want.std())

    factors = None if factor is None else (factor,) * 3
    whole = run(torch.float8_e4m3fn, factors)
    assert 1e-3 < off(whole) < 0.3
    assert torch.equal(run(torch.float8_e4m3fn, factors, chunk=7), whole)
    assert 1e-6 < off(run(torch.bfloat16, None)) < 0.02
    # A scale that is far too small cuts latents off.
    assert off(run(torch.float8_e4m3fn, (1e-6,) * 3)) > 0.5
