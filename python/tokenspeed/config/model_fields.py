# SPDX-License-Identifier: MIT
"""Values of a model's files that are numbers or ids, with the file's name for messages. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.config.model_error import ModelError


@dataclass(frozen=True)
class Fields:
    """Values of one file, with its name for messages."""

    values: Mapping[str, Any]
    where: str

    def integer(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            what = "is missing" if value is None else f"must be a positive whole number, got {value!r}"
            raise ModelError(f"{self.where}: {name!r} {what}")
        return value

    def refuse_other(self, name: str, supported: str | None) -> None:
        value = self.values.get(name, supported)
        if value != supported:
            raise ModelError(f"{self.where}: {name} {value!r} is not supported (only {supported or 'none'})")


def even_share(hidden_size: int, num_heads: int, where: str) -> int:
    """The size of a head where the file does not say it."""
    if hidden_size % num_heads:
        raise ModelError(f"{where}: hidden size {hidden_size} does not divide among {num_heads} heads (no head_dim)")
    return hidden_size // num_heads


def ids_of(*values: Any) -> tuple[int, ...]:
    """Token ids out of numbers, lists and gaps, in order, each once."""
    found: dict[int, None] = {}
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int):
                found[item] = None
    return tuple(found)
