# SPDX-License-Identifier: MIT
"""From which context on attention is the greater part of a prompt token's work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config.model import load_model_config
from tokenspeed.config.testing import DEEPSEEK, LLAMA, MIXTRAL, folder_with
from tokenspeed.config.work import context_cost_tokens

QWEN3_8B = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 128}


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        # 192.9 million weights a layer twice, over 4 * 32 * 128 operations per token attended to.
        (QWEN3_8B, 23_552),
        # Eight experts, two a token: 2 * (16 * 2 * 6 * 64 + 64 * (3 * 2 * 96 + 8)) / (4 * 64).
        (MIXTRAL | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}, 388),
        (MISTRAL, 0),
        (MISTRAL | {"sliding_window": None}, 240),
    ],
)
def test_context_counts_as_much_as_the_weights_from_there_on(
    tmp_path: Path, values: dict[str, Any], tokens: int
) -> None:
    assert context_cost_tokens(load_model_config(folder_with(tmp_path, values))) == tokens


def test_latents_cost_all_heads_their_latent_dimension(tmp_path: Path) -> None:
    short = load_model_config(folder_with(tmp_path, DEEPSEEK | {"kv_lora_rank": 32}))
    long = load_model_config(folder_with(tmp_path, DEEPSEEK | {"kv_lora_rank": 512}))
    assert context_cost_tokens(short) > 2 * context_cost_tokens(long)
