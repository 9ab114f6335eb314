# SPDX-License-Identifier: MIT
"""Tables of cosines and sines for rotary embeddings (Su et al. 2021) and the ways of stretching them.

linear: positions divided by a factor (Chen et al. 2023). llama3: low frequencies divided, high ones kept, a ramp
between (Llama 3.1). yarn: the same idea with a ramp over dimensions and louder keys (Peng et al. 2023). longrope: a
divisor for each frequency (Ding et al. 2024). dynamic: a base that grows with the context (NTK-aware scaling, 2023).
Computed once, at load, for the longest context that is served; `config.rope` says why.
"""

from __future__ import annotations

import math

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.rope import RopeScaling


def rope_tables(config: ModelConfig, device: torch.device) -> list[torch.Tensor]:
    """Each layer's table; layers that rotate alike share one."""
    full = rope_table(config.rotary_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
    full = full.to(device)
    if config.windowed_rope_theta is None:
        return [full] * config.num_layers
    windowed = rope_table(
        config.rotary_dim, config.windowed_rope_theta, config.windowed_rope_scaling, config.max_position_embeddings
    ).to(device)
    return [windowed if window else full for window in config.windows]


def rope_table(rotary_dim: int, theta: float, scaling: RopeScaling | None, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: a position's cosines, then its sines. ModelError: too long for memory."""
    try:
        return _table(rotary_dim, theta, scaling, num_positions)
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        message = f"--max-model-len: tables for a context of {num_positions} tokens do not fit in memory; give fewer"
        raise ModelError(message) from None


def _table(rotary_dim: int, theta: float, scaling: RopeScaling | None, num_positions: int) -> torch.Tensor:
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rotary_dim, theta, scaling, num_positions)[None, :]
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    return table if scaling is None else table.mul_(scaling.amplitude)


def inverse_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None, context: int) -> torch.Tensor:
    """float32 [rotary_dim / 2]: radians that each pair turns from one position to the next.

    context: the longest that is served, in tokens.
    """
    if scaling is not None and scaling.kind == "dynamic":
        theta *= _dynamic_growth(rotary_dim, scaling, context)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling.kind == "yarn":
        frequencies = _yarn(frequencies, rotary_dim, theta, scaling)
    if divisors := scaling.divisors(context):
        frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32)
    return frequencies


def _dynamic_growth(rotary_dim: int, scaling: RopeScaling, context: int) -> float:
    """What the base is multiplied by, so that the slowest pair turns over `context` as it did over the old one."""
    stretch = max(1.0, context / scaling.original_max_position_embeddings)
    return float((scaling.factor * (stretch - 1) + 1) ** (rotary_dim / (rotary_dim - 2)))


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Waves longer than the old context over low_freq_factor are stretched, shorter than over high_freq_factor kept."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(frequencies: torch.Tensor, rotary_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Pairs that turn more than beta_fast times in the old context are kept, fewer than beta_slow are stretched."""

    def pair_with(num_turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return rotary_dim * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001
    index = torch.arange(rotary_dim // 2, dtype=torch.float32)
    stretched = ((index - first) / width).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
