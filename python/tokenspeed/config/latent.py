# SPDX-License-Identifier: MIT
"""Multi-head latent attention as a config.json declares it (DeepSeek-V2 and V3). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.config.model_error import ModelError

_UNIT = 16
"""Elements that a GPU's kernels take at once."""


@dataclass(frozen=True)
class LatentConfig:
    """Keys and values of all heads are products of one cached vector a token, the latent; beside it lies one key that
    is rotated and that all heads share. Sizes in elements.

    query_rank: of the vector that queries are made of; None: they are made of the hidden state.
    latent_dim: of the latent (kv_lora_rank).
    nope_dim, rope_dim: of a head's query and key, the part that is not rotated and the one that is.
    value_dim: of a head's value.
    interleaved: rotated pairs are neighbours, not half a head apart.
    """

    query_rank: int | None
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def query_dim(self) -> int:
        """Of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Of what is cached of a token."""
        return self.latent_dim + self.rope_dim

    def check_registers(self) -> None:
        """Raise ModelError for sizes that a GPU's kernels cannot do. A CPU's take any, though slowly."""
        sizes = {"kv_lora_rank": self.latent_dim, "qk_rope_head_dim": self.rope_dim, "v_head_dim": self.value_dim}
        for name, size in sizes.items():
            if size % _UNIT:
                raise ModelError(
                    f"{name} {size} is not supported on a GPU (only multiples of {_UNIT}); use --device cpu"
                )


def latent_from_json(values: Mapping[str, Any], where: str) -> LatentConfig:
    """Of a config.json's values. Raises ModelError."""
    return LatentConfig(
        query_rank=None if values.get("q_lora_rank") is None else _size(values, "q_lora_rank", where),
        latent_dim=_size(values, "kv_lora_rank", where),
        nope_dim=_size(values, "qk_nope_head_dim", where),
        rope_dim=_size(values, "qk_rope_head_dim", where),
        value_dim=_size(values, "v_head_dim", where),
        interleaved=bool(values.get("rope_interleave", True)),
    )


def latent_from_gguf(values: Mapping[str, Any], where: str) -> LatentConfig:
    """Of a GGUF file's metadata without the architecture's prefix. Raises ModelError."""
    # Newer files tell the sizes of what is cached by the plain names, and those of heads by names of their own.
    suffix = "_mla" if "attention.key_length_mla" in values else ""
    rope_dim = _size(values, "rope.dimension_count", where)
    rank = None if "attention.q_lora_rank" not in values else _size(values, "attention.q_lora_rank", where)
    return LatentConfig(
        query_rank=rank,
        latent_dim=_size(values, "attention.kv_lora_rank", where),
        nope_dim=_size(values, f"attention.key_length{suffix}", where) - rope_dim,
        rope_dim=rope_dim,
        value_dim=_size(values, f"attention.value_length{suffix}", where),
        interleaved=True,
    )


def _size(values: Mapping[str, Any], name: str, where: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{where}: {name!r} must be a positive whole number, got {value!r}")
    return value
