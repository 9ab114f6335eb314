# SPDX-License-Identifier: MIT
"""Loading through the whole `Engine`: quantized checkpoints and fp8 caches give the right tokens, and whatever is wrong
with a model ends before anything is loaded, in one line that names the file or the flag and what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.quantized import SCHEMES, quantize_folder
from tokenspeed import Engine
from tokenspeed.cli.errors import reporting

PROMPT = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(5)).tolist()
QUIET: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_total_tokens": 2048,
    "block_size": 16,
    "log_level": "error",
}


def make_model(folder: Path) -> transformers.LlamaForCausalLM:
    """A random Llama of two layers, in bfloat16 files."""
    torch.manual_seed(13)
    config = transformers.LlamaConfig(
        vocab_size=250,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.2 + ("norm" in name)).bfloat16())
    model.bfloat16().save_pretrained(folder)
    return model.float()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "model"
    make_model(folder)
    return folder


def greedy(engine: Engine, num_tokens: int = 24) -> list[int]:
    params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True, "stop_token_ids": []}
    return engine.generate([PROMPT], params)[0].token_ids


def likeliest(model: transformers.LlamaForCausalLM, tokens: list[int]) -> list[int]:
    """What `transformers` would choose after every prefix."""
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    choices: list[int] = logits.argmax(dim=1).tolist()
    return choices


@pytest.mark.parametrize("name", ["fp8 in tiles", "w8a8 int8", "w4a16 with an order of columns", "mxfp4", "awq"])
def test_greedy_tokens_of_a_quantized_checkpoint_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = make_model(tmp_path)
    theirs.load_state_dict(quantize_folder(tmp_path, SCHEMES[name]), strict=False)
    with Engine(str(tmp_path), **QUIET) as engine:
        tokens = greedy(engine)
    assert tokens == likeliest(theirs, tokens)


@pytest.mark.parametrize("method", ["none", "per_token_head"])
def test_fp8_cache_gives_the_same_tokens_cold_and_warm_in_less_memory(method: str, checkpoint: Path) -> None:
    options = {"kv_cache_dtype": "fp8_e4m3", "kv_cache_quant_method": method, "max_total_tokens": None}
    with Engine(str(checkpoint), **(QUIET | options | {"kv_cache_gib": 0.001})) as engine:
        cold = engine.generate([PROMPT], {"temperature": 0.0, "max_new_tokens": 24})[0]
        warm = engine.generate([PROMPT], {"temperature": 0.0, "max_new_tokens": 24})[0]
        num_blocks = engine.load().total_blocks
    assert cold.cached_tokens == 0 < warm.cached_tokens
    assert cold.token_ids == warm.token_ids
    # One block: 16 tokens of 2 layers, keys and values of 2 heads of 32 bytes, and perhaps a float each.
    block_bytes = 16 * 2 * 2 * 2 * (32 + (4 if method == "per_token_head" else 0))
    assert num_blocks == int(0.001 * 2**30) // block_bytes


def test_load_formats_give_the_same_tokens(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    with Engine(str(folder), **QUIET) as engine:
        want = greedy(engine, 8)
    with Engine(str(folder), **QUIET, load_format="npcache") as engine:
        assert greedy(engine, 8) == want
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with Engine(str(folder), **QUIET, load_format="pt") as engine:
        assert greedy(engine, 8) == want


Damage = Callable[[Path], None]


def change_config(**values: Any) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return damage


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def overwrite_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)


def tell_another_checksum(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def nothing(folder: Path) -> None:
    pass


UP = "model.layers.1.mlp.up_proj.weight"
TABLE: dict[str, tuple[Damage, dict[str, Any], tuple[str, ...]]] = {
    "unknown architecture": (
        change_config(architectures=["FooForCausalLM"]),
        {},
        ("config.json", "FooForCausalLM is not supported", "LlamaForCausalLM"),
    ),
    "missing shard": (lose_a_shard, {}, ("model-00002-of-00002.safetensors", "missing", "download it")),
    "no weights at all": (lambda folder: (folder / "model.safetensors").unlink(), {}, ("no *.safetensors", "download")),
    "truncated file": (cut, {}, ("model.safetensors", "truncated", "download it again")),
    "damaged header": (overwrite_header, {}, ("model.safetensors", "not a safetensors file", "download it again")),
    "wrong checksum": (tell_another_checksum, {}, ("model.safetensors", "wrong SHA-256", "download it again")),
    "wrong shape": (change_config(intermediate_size=128), {}, ("model.safetensors", "[256, 128]", "[128, 128]")),
    "wrong dtype": (
        change_tensors(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int32)})),
        {},
        ("model.safetensors", UP, "int32", "quantization_config"),
    ),
    "missing tensor": (
        change_tensors(lambda tensors: tensors.pop(UP)),
        {},
        (UP, "is missing", "the download is incomplete"),
    ),
    "tensor of another architecture": (
        change_tensors(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)})),
        {},
        ("model.safetensors", "q_proj.bias", "has no place"),
    ),
    "unsupported quantization": (
        change_config(quantization_config={"quant_method": "aqlm"}),
        {},
        ("config.json", "'aqlm' is not supported", "use a GGUF file"),
    ),
    "unsupported bits": (
        change_config(
            quantization_config={
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 2}}},
            }
        ),
        {},
        ("config.json", "2-bit int", "not supported"),
    ),
    "quantization that the files contradict": (nothing, {"quantization": "mxfp4"}, ("--quantization", "mxfp4")),
    "cache dtype without a kernel": (nothing, {"kv_cache_dtype": "mxfp8"}, ("--kv-cache-dtype", "use fp8_e4m3")),
    "file of scales that is not there": (
        nothing,
        {"kv_cache_dtype": "fp8", "quantization_param_path": "/no/such.json"},
        ("--quantization-param-path /no/such.json", "cannot be read"),
    ),
    "too little memory for weights": (
        change_config(vocab_size=2**40),
        {"load_format": "dummy"},
        ("do not fit in the memory of cpu", "use a smaller model"),
    ),
    "too little memory for blocks": (
        nothing,
        {"max_total_tokens": None, "kv_cache_gib": 1e-9},
        ("--kv-cache-gib", "no room for a KV block"),
    ),
    "files of another format": (nothing, {"load_format": "pt"}, ("no *.bin or *.pt file", "download")),
    "loader that is not there": (
        nothing,
        {"load_format": "extensible", "model_loader_extra_config": '{"loader": "no_such_module:Loader"}'},
        ("--model-loader-extra-config", "cannot be imported"),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_model_ends_with_status_2_and_one_line_that_names_it(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, options, words = TABLE[name]
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    damage(folder)

    def run() -> int:
        with Engine(str(folder), **(QUIET | options)):
            return 0

    assert reporting("ts", run) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ts: error: ")]
    assert len(lines) == 1
    assert [word for word in words if word not in lines[0]] == []


@pytest.mark.parametrize("length", [40, 100_000])
def test_truncated_gguf_file_is_named(length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenspeed.config.model_source import embedded_model_path

    file = tmp_path / "m.gguf"
    with embedded_model_path().open("rb") as whole:
        file.write_bytes(whole.read(length))

    def run() -> int:
        with Engine(str(file), **QUIET):
            return 0

    assert reporting("ts", run) == 2
    assert f"ts: error: {file}: " in capsys.readouterr().err


def test_serve_exits_with_2_and_one_line_before_it_listens(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    change_config(architectures=["FooForCausalLM"])(folder)
    for flags, word in (([], "FooForCausalLM"), (["--load-format", "nonsense"], "--load-format")):
        result = subprocess.run(
            [sys.executable, "-m", "tokenspeed.cli.ts", "serve", str(folder), *flags],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 2
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        assert len(lines) == 1 and word in lines[0]
