# SPDX-License-Identifier: MIT
"""How a model rotates queries and keys, as its files declare it. Pure data; `layers.rope` computes the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokenspeed.config.model_error import ModelError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """A rescaling of the rotary frequencies; fields that `kind` does not use keep their neutral values.

    factor: how many times longer than `original_max_position_embeddings` the context is made.
    attention_factor: multiplies cosines and sines (yarn); None: derived from `factor` and the two mscales.
    frequency_divisors: one number for each frequency, from a GGUF file's `rope_freqs.weight`; applied to any kind.
    """

    kind: RopeKind
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by (YaRN, Peng et al. 2023, section 3.4)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)


def rope_scaling_from_json(values: Mapping[str, Any], max_position_embeddings: int, where: str) -> RopeScaling | None:
    """The `rope_scaling` (or `rope_parameters`) object of a config.json; None when it changes nothing.

    Raises ModelError for a kind that is not supported, or a field that a kind needs and lacks.
    """
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ROPE_KINDS:
        raise ModelError(f"{where}: rope scaling {kind!r} is not supported ({', '.join(ROPE_KINDS)})")
    original = values.get("original_max_position_embeddings") or max_position_embeddings
    needed: tuple[str, ...] = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    if kind == "yarn" and values.get("factor") is None:
        needed = ()
    for name in needed:
        if not isinstance(values.get(name), (int, float)):
            raise ModelError(f"{where}: rope scaling {kind!r} needs a number {name!r}")
    return RopeScaling(
        kind=kind,
        factor=float(values.get("factor") or max_position_embeddings / original),
        original_max_position_embeddings=int(original),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=values.get("attention_factor"),
        mscale=float(values.get("mscale") or 0.0),
        mscale_all_dim=float(values.get("mscale_all_dim") or 0.0),
        truncate=bool(values.get("truncate", True)),
    )


def extended_context(max_position_embeddings: int, scaling: RopeScaling | None) -> int:
    """The context in tokens, after scaling, of a model whose files declare `max_position_embeddings`.

    Linear and yarn stretch what the model was trained on; for llama3 the declared number is already the stretched
    one. Dynamic scaling changes all frequencies with the length once past the declared context, which no cache of
    rotated keys can follow, so it ends there.
    """
    if scaling is None or scaling.kind in ("dynamic", "llama3", "default"):
        return max_position_embeddings
    return max(max_position_embeddings, int(scaling.original_max_position_embeddings * scaling.factor))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
