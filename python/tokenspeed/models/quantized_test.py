# SPDX-License-Identifier: MIT
"""Quantized checkpoints act as the dense models they stand for, on any number of ranks; fp8 caches move little."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.quantized import SCHEMES, Scheme, compressed, fp8_tensor, packed_int, quantize_folder
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.quantization import QuantGroup, Quantization
from tokenspeed.models import LoadOptions, Model, load_model
from tokenspeed.models.testing import PagedSequences
from tokenspeed.parallel import Group
from tokenspeed.weights import KVFormat
from tokenspeed.weights.folder_reader import FolderReader
from tokenspeed.weights.quantized_reader import QuantizedReader
from tokenspeed.weights.safetensors_reader import SafetensorsReader
from tokenspeed.weights.shard import own_columns, own_rows
from tokenspeed_kernel.api import PackedWeight
from tokenspeed_kernel.quant.reference import dequantize

# Sizes that tiles of 128 do not divide.
SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT = torch.randint(3, 250, (30,), generator=torch.Generator().manual_seed(3)).tolist()


def dense_model(folder: Path, changes: dict[str, Any]) -> transformers.LlamaForCausalLM:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(**(SIZES | changes), attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + ("norm" in name))
    model.save_pretrained(folder)
    return model


def load(folder: Path, load_format: str = "auto", options: LoadOptions | None = None) -> Model:
    source = ModelSource("folder", folder, "test")
    return load_model(source, load_model_config(source), "cpu", torch.float32, load_format, options=options)


def logits_of(model: Model) -> torch.Tensor:
    return PagedSequences(model, 1, 64).prefill(0, PROMPT)


def sizes_for(name: str) -> dict[str, Any]:
    return {"intermediate_size": 256} if "groups of 128" in name or "points" in name else {}


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_equal_transformers_on_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    theirs = dense_model(tmp_path, sizes_for(name))
    scheme = SCHEMES[name]
    before = theirs(torch.tensor([PROMPT])).logits[0].detach()
    theirs.load_state_dict(quantize_folder(tmp_path, scheme), strict=False)
    ours = load(tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    bound = 1e-4 if scheme.exact else 3e-2
    torch.testing.assert_close(logits_of(ours), expected, rtol=bound, atol=bound * float(expected.std()))
    # The check can see a quantization: it moves the logits further than the bound.
    assert (before - expected).abs().max() > 3 * bound * expected.std()


def reader_of(folder: Path) -> QuantizedReader:
    quantization = load_model_config(ModelSource("folder", folder, "test")).quantization
    assert quantization is not None
    inner: FolderReader = SafetensorsReader(folder)
    return QuantizedReader(inner, quantization, torch.bfloat16)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.exact])
def test_weights_read_are_the_values_meant_bit_for_bit(name: str, tmp_path: Path) -> None:
    dense_model(tmp_path, sizes_for(name))
    meant = quantize_folder(tmp_path, SCHEMES[name])
    reader = reader_of(tmp_path)
    for module in ("self_attn.k_proj", "mlp.down_proj"):
        full = f"model.layers.1.{module}.weight"
        weight = reader.read(full, tuple(meant[full].shape))
        if isinstance(weight, PackedWeight):
            values = dequantize(weight)
            if weight.columns is not None:
                values = torch.empty_like(values).index_copy_(1, weight.columns, values)
        else:
            values = weight.float()
        assert torch.equal(values, meant[full])
        assert isinstance(weight, PackedWeight) == (name != "mxfp4")


@pytest.mark.parametrize("name", ["fp8 in tiles", "w8a8 int8", "w4a16 with zero points", "w4a16 groups of 128"])
def test_shards_put_together_are_the_whole_scales_and_zero_points_too(name: str, tmp_path: Path) -> None:
    dense_model(tmp_path, {"intermediate_size": 384})
    meant = quantize_folder(tmp_path, SCHEMES[name])
    full = "model.layers.0.mlp.down_proj.weight"
    weight = reader_of(tmp_path).read(full, (128, 384))
    # 384 columns are three blocks of 128: a half of them is cut within a block.
    for cut, axis in ((own_rows, 0), (own_columns, 1)):
        parts = [cut(weight, Group(rank, 2), "w") for rank in range(2)]
        assert all(isinstance(part, PackedWeight) for part in parts)
        assert torch.equal(
            torch.cat([dequantize(part) for part in parts if isinstance(part, PackedWeight)], axis), meant[full]
        )


def test_groups_that_ranks_would_cut_are_refused_with_the_fix(tmp_path: Path) -> None:
    dense_model(tmp_path, {})
    quantize_folder(tmp_path, SCHEMES["w4a16 rows"])
    weight = reader_of(tmp_path).read("model.layers.0.mlp.down_proj.weight", (128, 160))
    with pytest.raises(
        ModelError, match=r"80 columns for each of 2 ranks are not whole int4_b32 blocks.*use fewer ranks"
    ):
        own_columns(weight, Group(0, 2), "w")


def test_order_of_columns_is_refused_where_inputs_are_split(tmp_path: Path) -> None:
    dense_model(tmp_path, {})
    quantize_folder(tmp_path, SCHEMES["w4a16 with an order of columns"])
    weight = reader_of(tmp_path).read("model.layers.0.mlp.down_proj.weight", (128, 160))
    with pytest.raises(ModelError, match=r"act-order.*use --tensor-parallel-size 1 or a variant"):
        own_columns(weight, Group(0, 2), "w")


def test_layers_that_are_ignored_may_be_dense(tmp_path: Path) -> None:
    theirs = dense_model(tmp_path, {})
    before = theirs(torch.tensor([PROMPT])).logits[0].detach()
    config = compressed("pack-quantized", "int", 4) | {"ignore": ["re:.*_proj"]}
    quantize_folder(tmp_path, Scheme(config, lambda weight: ({"weight": weight}, weight)))
    torch.testing.assert_close(logits_of(load(tmp_path)), before, rtol=1e-4, atol=1e-4)


def test_quantized_layer_without_a_group_is_refused(tmp_path: Path) -> None:
    dense_model(tmp_path, {})
    config = compressed("pack-quantized", "int", 4) | {"ignore": ["model.layers.1"]}
    quantize_folder(tmp_path, Scheme(config, packed_int(4, 32)))
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj\.weight_packed' is quantized, but .* no group"):
        load(tmp_path)


def test_missing_scale_is_named(tmp_path: Path) -> None:
    dense_model(tmp_path, {})

    def forgetful(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors, dense = fp8_tensor(weight)
        del tensors["weight_scale"]
        return tensors, dense

    quantize_folder(tmp_path, Scheme({"quant_method": "fp8"}, forgetful))
    with pytest.raises(ModelError, match=r"q_proj\.weight_scale' is missing beside its weight"):
        load(tmp_path)


@pytest.mark.parametrize("method", ["fp8", "w8a8_fp8"])
def test_dense_checkpoint_is_quantized_while_it_loads(method: str, tmp_path: Path) -> None:
    theirs = dense_model(tmp_path, {})
    group = QuantGroup(("Linear",), "fp8", (0, 0), rounds_inputs=True)
    online = LoadOptions(Quantization(method, (group,), (), online=True), {}, KVFormat(torch.float32, False, None))
    got = logits_of(load(tmp_path, options=online))
    dense = logits_of(load(tmp_path))
    for name, parameter in theirs.named_parameters():
        if name.endswith("_proj.weight"):
            scale = parameter.detach().abs().amax(dim=1, keepdim=True) / 448
            parameter.data = (parameter / scale).to(torch.float8_e4m3fn).float() * scale
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (got - dense).abs().max() > 1e-2


def test_what_is_decoded_or_computed_more_exactly_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense_model(tmp_path, {})
    quantize_folder(tmp_path, SCHEMES["mxfp4"])
    with caplog.at_level(logging.INFO, "tokenspeed.weights"):
        load(tmp_path)
    assert [record.message for record in caplog.records] == [
        "mxfp4 weights are decoded to bfloat16: no kernel here multiplies them as they are"
    ]
    caplog.clear()
    dense_model(tmp_path, {})
    quantize_folder(tmp_path, SCHEMES["fp8 with static inputs"])
    with caplog.at_level(logging.INFO, "tokenspeed.weights"):
        load(tmp_path)
    assert ["fp8 weights stay in fp8, inputs in float32" in record.message for record in caplog.records] == [True]


KV_SCALES = {
    f"model.layers.{layer}.self_attn.{name}": torch.tensor(value)
    for layer in range(2)
    for name, value in (("k_scale", 0.02), ("v_scale", 0.01))
}


@pytest.mark.parametrize("per_token_head", [False, True])
def test_fp8_cache_moves_logits_little_and_cold_equals_warm(per_token_head: bool, tmp_path: Path) -> None:
    dense_model(tmp_path, {})
    want = logits_of(load(tmp_path))
    kv = KVFormat(torch.float8_e4m3fn, per_token_head, None)
    model = load(tmp_path, options=LoadOptions(None, {}, kv))
    whole = PagedSequences(model, 1, 64).prefill(0, PROMPT)
    assert 1e-4 < (whole - want).abs().max() / want.std() < 0.5
    assert torch.equal(PagedSequences(model, 1, 64).prefill(0, PROMPT, chunk=7), whole)
    assert [tensor.dtype for tensor in model.kv_cache(16)[0]][:2] == [torch.float8_e4m3fn] * 2
    assert len(model.kv_cache(16)[0]) == (4 if per_token_head else 2)


def test_scales_of_the_checkpoint_or_of_a_file_are_used_for_an_fp8_cache(tmp_path: Path) -> None:
    dense_model(tmp_path, {})
    quantize_folder(tmp_path, SCHEMES["fp8 with dynamic inputs"], extra=KV_SCALES)
    quantization = load_model_config(ModelSource("folder", tmp_path, "test")).quantization

    def run(factors: tuple[float, ...] | None) -> torch.Tensor:
        kv = KVFormat(torch.float8_e4m3fn, False, factors)
        return logits_of(load(tmp_path, options=LoadOptions(quantization, {}, kv)))

    exact = logits_of(load(tmp_path))
    stored, tiny = run(None), run((1e-6, 1e-6))
    assert (stored - exact).abs().mean() / exact.std() < 0.1
    # Scales that are far too small cut keys and values off.
    assert (tiny - exact).abs().mean() / exact.std() > 0.3
    assert not torch.equal(stored, run((0.02, 0.02)))
