# SPDX-License-Identifier: MIT
"""How keys and values are kept in the cache: their dtype and, for fp8, where their scales come from.

Made once by the engine from the flags; layers ask it for their own two scales while they are built.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed.config.model_error import ModelError

# Names of a layer's scales under its attention module, for keys and for values, in the order they are looked for.
_SCALE_NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale", "kv_scale"))


ScalarSource = Callable[[str], float | None]
"""From a tensor's name to its one value; None when the checkpoint has no such tensor."""


@dataclass(frozen=True)
class KVFormat:
    """dtype: of a cached element. per_token_head: each head of each token has a scale of its own, found when it is
    stored. factors: one scale a layer for keys and values, from a file, in place of the checkpoint's."""

    dtype: torch.dtype
    per_token_head: bool
    factors: tuple[float, ...] | None

    @property
    def is_fp8(self) -> bool:
        return self.dtype == torch.float8_e4m3fn

    def scales(self, layer: int, scalar: ScalarSource) -> tuple[float, float]:
        """What keys and values of a layer are divided by before they are rounded; 1 where nobody says."""
        if not self.is_fp8 or self.per_token_head:
            return 1.0, 1.0
        if self.factors is not None:
            return self.factors[layer], self.factors[layer]
        for k_name, v_name in _SCALE_NAMES:
            k_scale, v_scale = scalar(k_name), scalar(v_name)
            if k_scale is not None and v_scale is not None:
                return k_scale, v_scale
        return 1.0, 1.0


def kv_factors(path: str, num_layers: int) -> tuple[float, ...]:
    """Scales of a `--quantization-param-path` file: {"kv_cache": {"scaling_factor": {"0": {"0": 0.02, ...}}}}, by
    rank and layer. Ranks share what they cache, so rank 0's serve all. Raises ModelError."""
    where = f"--quantization-param-path {path}"
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        by_layer = values["kv_cache"]["scaling_factor"]["0"]
        factors = tuple(float(by_layer[str(layer)]) for layer in range(num_layers))
    except OSError as error:
        raise ModelError(f"{where}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{where}: no kv_cache.scaling_factor of {num_layers} layers ({error!r})") from None
    if not all(factor > 0 for factor in factors):
        raise ModelError(f"{where}: scaling factors must be positive")
    return factors
