# SPDX-License-Identifier: MIT
"""The embedded model with its real, packed weights against `transformers` on the dequantised ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from tests.support.reference import load_reference
from tokenspeed.config.gguf import read_gguf
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import ModelSource, embedded_model_path
from tokenspeed.models import Model, load_model
from tokenspeed.models.testing import PagedSequences

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PROMPTS = [
    CHAT.format("What is the capital of France?"),
    CHAT.format("Write a short poem about a lighthouse keeper and the sea."),
    CHAT.format("Explain how photosynthesis works, in three sentences."),
    "The quick brown fox jumps over the lazy dog, and then",
    "1, 1, 2, 3, 5, 8, 13,",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return embedded_model_path()


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    source = ModelSource("gguf", path, "embedded")
    return load_model(source, load_model_config(source), "cpu", torch.float32)


@pytest.fixture(scope="module")
def reference(path: Path) -> transformers.LlamaForCausalLM:
    return load_reference(path)


@pytest.fixture(scope="module")
def prompts(path: Path) -> list[list[int]]:
    metadata = read_gguf(path).metadata
    names = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = [names[i] for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in special])
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def test_logits_equal_transformers_on_dequantised_weights(
    model: Model, reference: transformers.LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    for prompt in prompts[:3]:
        expected = forward(reference, prompt)
        logits = PagedSequences(model, 1, 64).prefill(0, prompt)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3)


def test_64_greedy_tokens_equal_transformers(
    model: Model, reference: transformers.LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    for prompt in prompts:
        tokens = PagedSequences(model, 1, 160).greedy(0, prompt, 64)
        # Step by step, theirs would choose the same: after each prefix of ours, its likeliest token is ours.
        logits = forward(reference, prompt + tokens)[len(prompt) - 1 : -1]
        best, chosen = logits.amax(dim=1), logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        # Where the two likeliest logits are this close, the order of float32 sums decides.
        assert (best - chosen).max() < 1e-3


def test_chunks_of_any_size_and_any_block_size_equal_whole_prefill(model: Model, prompts: list[list[int]]) -> None:
    prompt = prompts[1] + prompts[2]
    whole = PagedSequences(model, 1, 128, block_size=16).prefill(0, prompt)
    for chunk, block_size in ((1, 16), (7, 16), (16, 8), (33, 32), (50, 64)):
        chunked = PagedSequences(model, 1, 128, block_size).prefill(0, prompt, chunk)
        assert torch.equal(chunked, whole), f"chunks of {chunk} tokens with blocks of {block_size}"


def test_a_row_has_the_same_bits_alone_and_in_a_mixed_batch(model: Model, prompts: list[list[int]]) -> None:
    alone = PagedSequences(model, 1, 64)
    first = alone.prefill(0, prompts[0])
    second = alone.step([(0, [504])])[0]
    mixed = PagedSequences(model, 4, 64)
    for sequence in (1, 2):
        mixed.prefill(sequence, prompts[sequence])
    amid = mixed.step([(1, [5]), (2, [6]), (0, prompts[0]), (3, prompts[3])])[2]
    assert torch.equal(amid, first)
    assert torch.equal(mixed.step([(2, [7]), (0, [504]), (1, [8])])[1], second)


@torch.inference_mode()
def forward(reference: transformers.LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of `transformers`."""
    logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits
