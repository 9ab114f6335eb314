# SPDX-License-Identifier: MIT
"""How a model rotates queries and keys, as its files declare it. Pure data; `layers.rope` computes the tables.

Two kinds of scaling choose frequencies by the length of the sequence: longrope has one set for sequences within the
old context and one for longer ones, dynamic changes its base with every token past it. Rotated keys in a cache cannot
change with them, and a prefix shared by a short and a long request must not. So the choice is made once, by the
longest context that the engine serves (`--max-model-len`): for longrope, `transformers` computes the same for every
sequence on that side of the old context; for dynamic, for sequences of just that length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokenspeed.config.json_keys import DIVISORS, NUMBER, OBJECT, POSITIVE, SIZE, SWITCH, TEXT, Rule, check_all
from tokenspeed.config.model_error import ModelError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope"}
_NUMBERS_NEEDED: dict[RopeKind, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RopeScaling:
    """A rescaling of the rotary frequencies; fields that `kind` does not use keep their neutral values.

    factor: how many times longer than `original_max_position_embeddings` the context is made.
    attention_factor: multiplies cosines and sines (yarn, longrope); None: derived from `factor` and the two mscales.
    frequency_divisors: one number for each frequency, from a GGUF file's `rope_freqs.weight`; applied to any kind.
    short_divisors, long_divisors: the same (longrope), for contexts within the original one and for longer ones.
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
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by (YaRN, Peng et al. 2023, 3.4; LongRoPE, Ding et al. 2024)."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            stretch = math.log(self.factor) / math.log(self.original_max_position_embeddings)
            return math.sqrt(1 + stretch) if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def latent_amplitude(self) -> float:
        """What latent attention multiplies its scores by (DeepSeek-V2): both q and k carry yarn's mscale_all_dim."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def divisors(self, context: int) -> tuple[float, ...]:
        """What each frequency is divided by when the longest context served is `context`; () for nothing."""
        if self.kind == "longrope":
            return self.long_divisors if context > self.original_max_position_embeddings else self.short_divisors
        return self.frequency_divisors


GEMMA_WINDOWED_THETA = 10000.0
_KINDS_OF_LAYER = ("full_attention", "sliding_attention")
_RULES: dict[str, Rule] = {
    "rope_type": TEXT,
    "type": TEXT,
    **dict.fromkeys(("rope_theta", "factor", "partial_rotary_factor", "beta_fast", "beta_slow"), POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "attention_factor"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NUMBER),
    "original_max_position_embeddings": SIZE,
    **dict.fromkeys(("short_factor", "long_factor"), DIVISORS),
    "truncate": SWITCH,
}


def rope_from_json(
    values: Mapping[str, Any], own_windowed: bool, where: str
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Rotary parameters of the layers that see everything, and of those with a window where these have their own.

    values: checked ones of a config.json. own_windowed: whether the architecture's windowed layers do. ModelError.
    """
    nested = values.get("rope_parameters") or {}
    if any(kind in nested for kind in _KINDS_OF_LAYER):
        check_all(nested, dict.fromkeys(_KINDS_OF_LAYER, OBJECT), f"{where}: rope_parameters")
        full, windowed = (nested.get(kind) or {} for kind in _KINDS_OF_LAYER)
        return _checked(full, values["rope_theta"], where), _checked(windowed, GEMMA_WINDOWED_THETA, where)
    rope = _checked(values.get("rope_scaling") or nested, values["rope_theta"], where)
    if values.get("original_max_position_embeddings"):
        # Phi-3's place for it, which goes before the other.
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    if not own_windowed:
        return rope, None
    return rope, {"rope_theta": values["rope_local_base_freq"]}


def _checked(rope: Mapping[str, Any], base: float, where: str) -> dict[str, Any]:
    """Without nulls, and with a base."""
    check_all(rope, _RULES, f"{where}: rope scaling")
    return {"rope_theta": base} | {key: value for key, value in rope.items() if value is not None}


def rope_scaling_from_json(values: Mapping[str, Any], max_position_embeddings: int, where: str) -> RopeScaling | None:
    """The `rope_scaling` (or `rope_parameters`) object of a config.json; None when it changes nothing.

    Raises ModelError for a kind that is not supported, or a field that a kind needs and lacks.
    """
    name = values.get("rope_type", values.get("type", "default"))
    kind = _OLD_NAMES.get(name, name)
    if values.get("mrope_section") is not None:
        raise ModelError(f"{where}: rope with 'mrope_section' (several positions a token) is not supported")
    if kind == "default":
        return None
    if kind not in ROPE_KINDS:
        raise ModelError(f"{where}: rope scaling {name!r} is not supported ({', '.join(ROPE_KINDS)})")
    # Dynamic scaling starts where the declared context ends, whatever else the files say.
    declared = None if kind == "dynamic" else values.get("original_max_position_embeddings")
    original = declared or max_position_embeddings
    for needed in _NUMBERS_NEEDED.get(kind, ()):
        if values.get(needed) is None:
            raise ModelError(f"{where}: rope scaling {kind!r} needs a number {needed!r}")
    lists = ("short_factor", "long_factor") if kind == "longrope" else ()
    for needed in lists:
        if values.get(needed) is None:
            raise ModelError(f"{where}: rope scaling {kind!r} needs a list {needed!r}")
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
        short_divisors=tuple(values["short_factor"]) if lists else (),
        long_divisors=tuple(values["long_factor"]) if lists else (),
    )


def extended_context(max_position_embeddings: int, scaling: RopeScaling | None) -> int:
    """The context in tokens, after scaling, of a model whose files declare `max_position_embeddings`.

    Linear and yarn stretch what the model was trained on; for llama3 and longrope the declared number is already the
    stretched one. Dynamic scaling changes nothing within the declared context, so that is where it ends by default;
    `longest_context` is where it ends when asked for more.
    """
    if scaling is None or scaling.kind in ("dynamic", "llama3", "longrope", "default"):
        return max_position_embeddings
    return max(max_position_embeddings, int(scaling.original_max_position_embeddings * scaling.factor))


def longest_context(context: int, scaling: RopeScaling | None) -> int:
    """The longest context that may be asked for, of a model that serves `context` by default."""
    if scaling is None or scaling.kind != "dynamic":
        return context
    return max(context, int(scaling.original_max_position_embeddings * scaling.factor))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
