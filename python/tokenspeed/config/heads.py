# SPDX-License-Identifier: MIT
"""How attention heads and other parts of a model are dealt out to the ranks that share it. Pure numbers.

Queries that read one KV head stay together. With at least as many KV heads as ranks each rank has some of its own,
the first ranks one more where they do not divide; with more ranks than KV heads several ranks have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tokenspeed.config.model_error import ModelError

FLAG = "--tensor-parallel-size"


@dataclass(frozen=True)
class Share:
    """Elements [start, start + count) of something that is split among ranks."""

    start: int
    count: int

    def scaled(self, width: int) -> Share:
        """The same where every element is `width` smaller ones."""
        return Share(self.start * width, self.count * width)


class Shape(Protocol):
    """What of a model's shape decides whether it can be split."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


def fair_share(size: int, rank: int, num_ranks: int) -> Share:
    """The rank's part of what is split as evenly as it divides: the first ranks have one element more."""
    each, more = divmod(size, num_ranks)
    return Share(rank * each + min(rank, more), each + (rank < more))


def head_shares(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> tuple[Share, Share]:
    """The rank's query heads and its KV heads. Raises ModelError."""
    if num_ranks <= num_kv_heads:
        kv = fair_share(num_kv_heads, rank, num_ranks)
        return kv.scaled(num_heads // num_kv_heads), kv
    if num_heads % num_ranks or num_ranks % num_kv_heads:
        raise ModelError(
            f"{FLAG}: {num_heads} heads over {num_kv_heads} KV heads do not divide among {num_ranks} ranks; "
            f"use {num_kv_heads} or fewer"
        )
    return fair_share(num_heads, rank, num_ranks), Share(rank * num_kv_heads // num_ranks, 1)


def check_split(shape: Shape, latent: bool, num_ranks: int) -> None:
    """Raise ModelError when the ranks cannot share a model; its matrices are looked at when they are read."""
    if latent and shape.num_heads % num_ranks:
        raise ModelError(f"{FLAG}: {shape.num_heads} heads do not divide among {num_ranks} ranks")
    if not latent:
        head_shares(shape.num_heads, shape.num_kv_heads, 0, num_ranks)
