# SPDX-License-Identifier: MIT
"""Routing and experts by hand on numbers small enough to follow, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.moe.reference import prepare, route, run_experts


def chosen_by(logits: list[float], routing: api.Routing, bias: list[float] | None = None) -> list[int]:
    correction = None if bias is None else torch.tensor(bias)
    experts: list[int] = route(torch.tensor([logits]), routing, correction)[1][0].tolist()
    return experts


def test_softmax_over_all_renormalised_equals_softmax_over_the_chosen() -> None:
    logits = torch.randn(5, 16)
    weights, experts = route(logits, api.Routing(16, 4), None)
    torch.testing.assert_close(weights, logits.gather(1, experts.long()).softmax(dim=1))


def test_weights_that_are_not_renormalised_are_the_scores_times_the_scale() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    weights, _ = route(logits, api.Routing(3, 2, renormalize=False, scale=3.0), None)
    torch.testing.assert_close(weights, 3 * logits.softmax(dim=1)[:, [1, 2]])


def test_equal_logits_choose_the_lowest_numbers() -> None:
    assert chosen_by([1.0, 2.0, 2.0, 2.0], api.Routing(4, 2)) == [1, 2]


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    routing = api.Routing(3, 1, scores="sigmoid", renormalize=False)
    weights, experts = route(torch.tensor([[3.0, 0.0, -3.0]]), routing, torch.tensor([0.0, 0.0, 5.0]))
    assert experts.tolist() == [[2]]
    torch.testing.assert_close(weights, torch.tensor([[-3.0]]).sigmoid())


def test_groups_are_ranked_by_their_best_or_by_their_best_two() -> None:
    logits = [9.0, 0.0, 0.0, 5.0, 5.0, 0.0]  # group 0 has the best one, group 1 the best two
    best = api.Routing(6, 2, num_groups=2, top_groups=1)
    best_two = api.Routing(6, 2, num_groups=2, top_groups=1, group_score="best_two", scores="sigmoid")
    assert chosen_by(logits, best) == [0, 1]
    assert chosen_by(logits, best_two) == [3, 4]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_experts": 8, "top_k": 2, "num_groups": 3}, "8 experts in 3 groups"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 2, "top_groups": 3}, "of which 3 are chosen"),
        ({"num_experts": 8, "top_k": 5, "num_groups": 2, "top_groups": 1}, "5 experts cannot be chosen from 1 groups"),
        ({"num_experts": 8, "top_k": 0}, "0 experts cannot be chosen"),
        (
            {"num_experts": 8, "top_k": 1, "num_groups": 8, "top_groups": 4, "group_score": "best_two"},
            "need at least two",
        ),
    ],
)
def test_rule_that_cannot_choose_is_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        api.Routing(**numbers)


def identity_layer(activation: api.GatedActivation) -> api.Experts:
    """Two experts on one number: gate x, up 2x, down the identity; the second expert's result is ten times as large."""
    gate_up = torch.tensor([[[1.0], [2.0]], [[1.0], [2.0]]])
    down = torch.tensor([[[1.0]], [[10.0]]])
    matrices = [prepare(list(part), 2, torch.device("cpu"), torch.float32) for part in (gate_up, down)]
    return api.Experts((matrices[0],), matrices[1], None, None, activation)


@pytest.mark.parametrize("x", [-3.0, 0.5, 9.0])
def test_result_is_the_weighted_sum_of_the_chosen_experts(x: float) -> None:
    weights, chosen = torch.tensor([[0.25, 0.75]]), torch.tensor([[1, 0]], dtype=torch.int32)
    out = run_experts(torch.tensor([[x]]), weights, chosen, identity_layer(api.GatedActivation()))
    silu = torch.nn.functional.silu(torch.tensor(x)) * 2 * x
    torch.testing.assert_close(out[0, 0], silu * (0.25 * 10 + 0.75))


@pytest.mark.parametrize("x", [-9.0, 0.5, 9.0])
def test_clamped_swiglu_holds_the_gate_below_and_up_within_the_limit(x: float) -> None:
    weights, chosen = torch.tensor([[1.0]]), torch.tensor([[0]], dtype=torch.int32)
    layer = identity_layer(api.GatedActivation("swiglu_clamped", 1.702, 7.0))
    out = run_experts(torch.tensor([[x]]), weights, chosen, layer)
    gate, up = torch.tensor(min(x, 7.0)), max(-7.0, min(2 * x, 7.0))
    torch.testing.assert_close(out[0, 0], gate * torch.sigmoid(1.702 * gate) * (up + 1))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([], "no experts to prepare"),
        ([torch.zeros(2, 3)], "2 experts expected, got 1"),
        ([torch.zeros(2, 3)] * 3, "2 experts expected, got more"),
        ([torch.zeros(2, 3), torch.zeros(3, 2)], "expert 1 is"),
        ([torch.zeros(2, 3), torch.zeros(2, 3).half()], "expert 1 is .*float16"),
    ],
)
def test_experts_that_do_not_go_together_are_refused(experts: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        api.prepare_experts(experts, 2, "cpu", torch.float32)
