# SPDX-License-Identifier: MIT
"""Frequencies of every scaling against `transformers`, and the layout of the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from tokenspeed.config.model_error import ModelError
from tokenspeed.config.rope import RopeScaling, rope_scaling_from_json
from tokenspeed.layers.rope import inverse_frequencies, rope_table
from tokenspeed_kernel import api

LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.01 * i for i in range(64)],
    "long_factor": [1.0 + 0.5 * i for i in range(64)],
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "values",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0} | LLAMA3,
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0} | LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 64},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
        | {"mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, "truncate": False},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_slow": 4}
        | {"attention_factor": 1.3},
        {"rope_type": "dynamic", "factor": 4.0},
        LONGROPE,
        LONGROPE | {"factor": 8.0},
        LONGROPE | {"attention_factor": 1.19},
    ],
)
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("served", [2048, 4096, 4097, 131072, 262144])
def test_frequencies_and_amplitude_equal_transformers(values: dict[str, Any], partial: float, served: int) -> None:
    theta, head_dim, context = 500000.0, 128, 131072
    rotary_dim = int(head_dim * partial)
    values = {k: v[: rotary_dim // 2] if isinstance(v, list) else v for k, v in values.items()}
    config = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters=values | {"rope_theta": theta, "partial_rotary_factor": partial},
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[values["rope_type"]](config, torch.device("cpu"), seq_len=served)
    scaling = rope_scaling_from_json(values, context, "config.json")
    assert scaling is not None
    frequencies = inverse_frequencies(rotary_dim, theta, scaling, served)
    torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=0)
    assert scaling.amplitude == pytest.approx(amplitude)


def test_part_of_a_head_turns_as_in_transformers_and_the_rest_stays() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = Phi3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, rope_parameters=rope
    )
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
    cos, sin = Phi3RotaryEmbedding(config)(q, torch.arange(9)[None])
    expected = [part[0].transpose(0, 1) for part in apply_rotary_pos_emb(q, k, cos, sin)]
    mine = [part[0].transpose(0, 1).contiguous() for part in (q, k)]
    api.rope(mine[0], mine[1], torch.arange(9), rope_table(8, 10000.0, None, 9))
    torch.testing.assert_close(mine, expected)


def test_neighbours_turn_as_in_transformers() -> None:
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 1, 9, 16)
    table = rope_table(16, 10000.0, None, 9)
    cos, sin = (torch.cat([half, half], dim=1)[None] for half in table.chunk(2, dim=1))
    theirs = apply_rotary_pos_emb_interleave(q, k, cos, sin)
    mine = [part[0].transpose(0, 1).contiguous() for part in (q, k)]
    api.rope(mine[0], mine[1], torch.arange(9), table, interleaved=True)
    # Theirs leaves the pairs' first elements in the first half of a head; ours puts them back where they were.
    for ours, their in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, their[0].transpose(0, 1).unflatten(2, (2, 8)).transpose(2, 3).flatten(2))


def test_divisors_of_a_gguf_file_divide_each_frequency() -> None:
    divisors = RopeScaling("default", frequency_divisors=(1.0, 2.0, 4.0, 8.0))
    plain = inverse_frequencies(8, 10000.0, None, 64)
    assert torch.equal(inverse_frequencies(8, 10000.0, divisors, 64) * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)


def test_a_context_whose_tables_do_not_fit_names_the_flag() -> None:
    with pytest.raises(ModelError, match="--max-model-len: tables for a context of 1000000000000000 tokens"):
        rope_table(8, 10000.0, None, 10**15)
