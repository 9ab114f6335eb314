# SPDX-License-Identifier: MIT
"""How a router's logits choose experts: one value that says it for every architecture we serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scores = Literal["softmax", "sigmoid"]
GroupScore = Literal["best", "best_two"]


@dataclass(frozen=True)
class Routing:
    """What turns logits of `num_experts` into `top_k` chosen experts and their weights.

    scores: softmax over all experts, or the sigmoid of each logit (DeepSeek-V3).
    renormalize: the weights of the chosen are divided by their sum. With softmax scores this equals a softmax over
        the chosen experts' logits alone (Mixtral, gpt-oss).
    scale: what weights are multiplied by in the end.
    num_groups, top_groups: experts lie in equal groups in order; only those of the `top_groups` best groups can be
        chosen. 1 and 1: any can.
    group_score: what ranks a group, its best expert (DeepSeek-V2) or the sum of its best two (DeepSeek-V3).

    Raises ValueError for numbers that leave fewer than `top_k` experts to choose from.
    """

    num_experts: int
    top_k: int
    scores: Scores = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "best"

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts in {self.num_groups} groups, of which {self.top_groups} are chosen, "
                "do not go together"
            )
        if not 1 <= self.top_k <= self.group_size * self.top_groups:
            raise ValueError(
                f"{self.top_k} experts cannot be chosen from {self.top_groups} groups of {self.group_size}"
            )
        if self.group_score == "best_two" and self.grouped and self.group_size < 2:
            raise ValueError("groups ranked by their best two experts need at least two")

    @property
    def group_size(self) -> int:
        """Experts of one group."""
        return self.num_experts // self.num_groups

    @property
    def grouped(self) -> bool:
        """Whether groups narrow the choice."""
        return self.top_groups < self.num_groups
