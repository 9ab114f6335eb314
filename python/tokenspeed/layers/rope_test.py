# SPDX-License-Identifier: MIT
"""Frequencies of every scaling against `transformers`, and the layout of the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenspeed.config.rope import RopeScaling, rope_scaling_from_json
from tokenspeed.layers.rope import inverse_frequencies

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
    ],
)
def test_frequencies_and_amplitude_equal_transformers(values: dict[str, Any]) -> None:
    theta, head_dim, context = 500000.0, 128, 131072
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=context, rope_parameters=values | {"rope_theta": theta}
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[values["rope_type"]](config, torch.device("cpu"))
    scaling = rope_scaling_from_json(values, context, "config.json")
    assert scaling is not None
    torch.testing.assert_close(inverse_frequencies(head_dim, theta, scaling), expected, rtol=1e-5, atol=0)
    assert scaling.amplitude == pytest.approx(amplitude)


def test_divisors_of_a_gguf_file_divide_each_frequency() -> None:
    divisors = RopeScaling("default", frequency_divisors=(1.0, 2.0, 4.0, 8.0))
    plain = inverse_frequencies(8, 10000.0, None)
    assert torch.equal(inverse_frequencies(8, 10000.0, divisors) * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)
