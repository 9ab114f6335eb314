# SPDX-License-Identifier: MIT
"""Perplexity of a written conversation under real weights: ours, on packed weights, is that of `transformers` on
dequantised ones, token by token.

The embedded model is always there. Two more are files that whoever wants the test puts into the folder
TOKENSPEED_OPTIONAL_MODELS (docs/contributing.md says which packages carry them); without them their tests are skipped.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import pytest
import torch

from tests.support.reference import load_reference, token_losses
from tokenspeed.config.gguf import read_gguf
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import ModelSource, embedded_model_path
from tokenspeed.gateway.text.gguf_tokenizer import tokenizer_from_gguf
from tokenspeed.models import KVFormat, LoadOptions, Model, load_model
from tokenspeed.models.testing import PagedSequences

CONVERSATION = Path(__file__).with_name("conversation.txt")
OPTIONAL_MODELS = "TOKENSPEED_OPTIONAL_MODELS"

# File, start of its SHA-256, how many tokens are scored, the packed types in it, and the perplexity that transformers
# 5 gives them. Gemma's windows see 512 tokens, so more are scored.
QWEN = ("qwen2.5-coder-0.5b-instruct.gguf", "1d961463", 512, {"q5_0", "q8_0", "q6_k", "q4_k"}, 30.115)
GEMMA = ("gemma-3-270m-q4_k_m.gguf", "a5fd3b62", 800, {"q5_0", "q8_0", "q6_k", "q4_k"}, 12.117)
SMOLLM2_PERPLEXITY = 13.788

FLOATS = KVFormat(torch.float32, False, None)
# Caches smaller than float32, and how much of the embedded model's perplexity each may add.
SMALL_CACHES = [
    (KVFormat(torch.bfloat16, False, None), 1e-3),
    (KVFormat(torch.float8_e4m3fn, False, None), 5e-3),
    (KVFormat(torch.float8_e4m3fn, True, None), 1e-2),
]


def optional_model(name: str, sha256: str) -> Path:
    """The file, or the test is skipped."""
    folder = os.environ.get(OPTIONAL_MODELS)
    path = Path(folder or "", name)
    if folder is None or not path.is_file():
        pytest.skip(f"{name} is not in the folder that {OPTIONAL_MODELS} names")
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest().startswith(sha256), f"{path}: not the file we know"
    return path


def tokens_of_the_conversation(path: Path, num_tokens: int) -> list[int]:
    tokenizer = tokenizer_from_gguf(read_gguf(path).metadata, str(path))
    ids = tokenizer.encode(CONVERSATION.read_text(encoding="utf-8"), add_special_tokens=True)
    assert len(ids) >= num_tokens
    return ids[:num_tokens]


def our_losses(path: Path, token_ids: list[int], chunk: int, kv: KVFormat = FLOATS) -> torch.Tensor:
    """Minus the log-probability of each token after the first, computed in chunks as the engine would."""
    source = ModelSource("gguf", path, "test")
    options = LoadOptions(None, {}, kv)
    model: Model = load_model(source, load_model_config(source), "cpu", torch.float32, options=options)
    sequences, losses = PagedSequences(model, 1, len(token_ids)), []
    targets = torch.tensor([*token_ids[1:], 0])
    for at in range(0, len(token_ids), chunk):
        logits = sequences.step([(0, token_ids[at : at + chunk])])[0]
        losses.append(torch.nn.functional.cross_entropy(logits, targets[at : at + chunk], reduction="none"))
    return torch.cat(losses)[:-1]


def compare(path: Path, num_tokens: int) -> float:
    """Perplexity of `transformers`, when ours is the same."""
    token_ids = tokens_of_the_conversation(path, num_tokens)
    ours = our_losses(path, token_ids, chunk=200)
    expected = token_losses(load_reference(path), token_ids)
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-3)
    perplexity = math.exp(expected.mean())
    assert math.exp(ours.mean()) == pytest.approx(perplexity, rel=1e-4)
    return perplexity


def test_embedded_model_has_the_perplexity_of_transformers_on_512_tokens_of_chat() -> None:
    assert compare(embedded_model_path(), 512) == pytest.approx(SMOLLM2_PERPLEXITY, rel=1e-3)


@pytest.mark.parametrize("known", [QWEN, GEMMA], ids=["Qwen2.5-Coder-0.5B", "Gemma-3-270M"])
def test_optional_model_has_the_perplexity_of_transformers(known: tuple[str, str, int, set[str], float]) -> None:
    name, sha256, num_tokens, types, perplexity = known
    path = optional_model(name, sha256)
    assert {tensor.type for tensor in read_gguf(path).tensors.values()} == types | {"f32"}
    assert compare(path, num_tokens) == pytest.approx(perplexity, rel=1e-3)


@pytest.mark.parametrize(("kv", "share"), SMALL_CACHES)
def test_smaller_cache_keeps_the_perplexity(kv: KVFormat, share: float) -> None:
    path = embedded_model_path()
    losses = our_losses(path, tokens_of_the_conversation(path, 512), 200, kv)
    perplexity = math.exp(losses.mean())
    assert perplexity == pytest.approx(SMOLLM2_PERPLEXITY, rel=share)
