# SPDX-License-Identifier: MIT
"""Mixtures of experts through the whole engine: the same bits cold or cached, alone or amid others, however cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.engine.offline import Engine
from tokenspeed.engine.testing import CONFIG

StartEngine = Callable[..., Engine]

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 20,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}
PROMPTS = [[(7 * start + 3 * step) % 317 + 3 for step in range(5 + 11 * start)] for start in range(6)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True, "logprobs": 2}


def results(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """Tokens and their exact log-probabilities of each prompt."""
    return [(output.token_ids, output.logprobs) for output in engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_same_cold_or_cached_alone_or_amid_others_and_in_chunks(
    start_engine: StartEngine, tmp_path: Path, name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | MODELS[name]))
    engine = start_engine(model=str(tmp_path), block_size=8)
    cold = results(engine, PROMPTS)
    assert results(engine, PROMPTS) == cold, "what the cache holds changes nothing"
    assert [results(engine, [prompt])[0] for prompt in PROMPTS] == cold, "nor do others in the batch"
    chunked = start_engine(model=str(tmp_path), chunked_prefill_size=16)
    assert results(chunked, PROMPTS) == cold, "nor does the size of chunks"
