# SPDX-License-Identifier: MIT
"""CPU experts at every instruction set: bits that no batch mate changes, and weights of unchosen experts unread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.moe import cpu_experts
from tokenspeed_kernel.moe.reference import route as reference_route
from tokenspeed_kernel.moe.reference import run_experts as reference
from tokenspeed_kernel.numerics.case import normal
from tokenspeed_kernel.numerics.cases import ROUTINGS, expert_matrix
from tokenspeed_kernel.numerics.cpu_isa import at_level, isa_levels, with_threads
from tokenspeed_kernel.quant.cpu_prepare import FORMAT_CODES

HIDDEN, INNER, EXPERTS, TOP_K = 256, 512, 6, 2


@pytest.fixture(params=isa_levels(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_level(request.param) as level:
        yield level


def raw_layer(format: str = "float32", biased: bool = True) -> api.Experts:
    """Gate and up in `format`, down too; as a file holds them."""
    generator = torch.Generator().manual_seed(1)
    return api.Experts(
        (expert_matrix(generator, format, (EXPERTS, 2 * INNER, HIDDEN), HIDDEN**-0.5),),
        expert_matrix(generator, format, (EXPERTS, HIDDEN, INNER), INNER**-0.5),
        normal(generator, EXPERTS, 2 * INNER) if biased else None,
        normal(generator, EXPERTS, HIDDEN) if biased else None,
        api.GatedActivation("swiglu_clamped", 1.702, 7.0) if biased else api.GatedActivation(),
    )


def prepared(layer: api.Experts) -> api.Experts:
    def prepare(matrix: api.ExpertMatrix) -> api.ExpertMatrix:
        return api.prepare_experts(matrix.experts(), EXPERTS, "cpu", torch.float32)

    return dataclasses.replace(
        layer, gate_up=tuple(prepare(matrix) for matrix in layer.gate_up), down=prepare(layer.down)
    )


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weights and chosen of `count` tokens; chosen differ in how many tokens an expert gets."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(count, EXPERTS, generator=generator) + torch.arange(EXPERTS) * 0.5
    weights, chosen = api.route(logits, api.Routing(EXPERTS, TOP_K))
    return torch.randn(count, HIDDEN, generator=generator) * 0.5, weights, chosen


@pytest.mark.parametrize("format", FORMAT_CODES)
def test_token_has_the_same_bits_alone_and_in_any_batch_and_on_any_number_of_threads(format: str) -> None:
    layer = prepared(raw_layer(format, biased=format == "float32"))
    x, weights, chosen = tokens(300)
    with with_threads(3):
        whole = api.run_experts(x, weights, chosen, layer)
    for begin, end in ((0, 1), (299, 300), (10, 12), (10, 15), (0, 250)):
        for threads in (1, 2):
            with with_threads(threads):
                part = api.run_experts(x[begin:end], weights[begin:end], chosen[begin:end], layer)
            assert torch.equal(part, whole[begin:end]), (begin, end, threads)


def test_parts_of_a_long_prefill_give_the_bits_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = prepared(raw_layer())
    x, weights, chosen = tokens(50)
    whole = api.run_experts(x, weights, chosen, layer)
    monkeypatch.setattr(cpu_experts, "_SCRATCH_FLOATS", 7 * TOP_K * (HIDDEN + 2 * INNER))
    assert torch.equal(api.run_experts(x, weights, chosen, layer), whole)


def test_experts_that_nobody_chose_are_not_read() -> None:
    raw = raw_layer()
    for matrix in (*raw.gate_up, raw.down):
        matrix.data[[0, 2, 5]] = float("nan")
    x, weights, _ = tokens(4)
    chosen = torch.tensor([[1, 3], [3, 4], [4, 1], [3, 1]], dtype=torch.int32)
    out = api.run_experts(x, weights, chosen, prepared(raw))
    torch.testing.assert_close(out, reference(x, weights, chosen, raw), rtol=1e-4, atol=1e-4)


def test_rows_of_a_wider_tensor_give_the_bits_of_contiguous_ones() -> None:
    layer = prepared(raw_layer())
    x, weights, chosen = tokens(5)
    wide = torch.full((5, 2 * HIDDEN), float("nan"))
    wide[:, 7 : 7 + HIDDEN] = x
    view = wide[:, 7 : 7 + HIDDEN]
    assert torch.equal(api.run_experts(view, weights, chosen, layer), api.run_experts(x, weights, chosen, layer))


def test_no_tokens_give_no_rows() -> None:
    x, weights, chosen = tokens(1)
    assert api.run_experts(x[:0], weights[:0], chosen[:0], prepared(raw_layer())).shape == (0, HIDDEN)
    assert api.route(torch.empty(0, EXPERTS), api.Routing(EXPERTS, TOP_K))[1].shape == (0, TOP_K)


@pytest.mark.parametrize("label", ROUTINGS)
def test_route_is_the_same_for_a_token_alone(label: str) -> None:
    routing = ROUTINGS[label]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2000, routing.num_experts, generator=generator)
    bias = torch.randn(routing.num_experts, generator=generator) * 0.1
    weights, experts = api.route(logits, routing, bias)
    assert torch.equal(experts, reference_route(logits, routing, bias)[1])
    for token in (0, 1999):
        alone = api.route(logits[token : token + 1], routing, bias)
        assert torch.equal(alone[0], weights[token : token + 1])
        assert torch.equal(alone[1], experts[token : token + 1])


def test_logits_that_are_not_numbers_still_choose_distinct_experts() -> None:
    _, experts = api.route(torch.full((1, 8), float("nan")), api.Routing(8, 3))
    assert experts.tolist() == [[0, 1, 2]]


def test_calls_that_do_not_fit_are_refused_by_name() -> None:
    layer = prepared(raw_layer())
    x, weights, chosen = tokens(3)
    with pytest.raises(ValueError, match="x has 255 columns"):
        api.run_experts(x[:, 1:], weights, chosen, layer)
    with pytest.raises(ValueError, match=r"chosen\[1\] is 6, must be in \[0, 6\)"):
        api.run_experts(x, weights, torch.tensor([[0, 6]] * 3, dtype=torch.int32), layer)
    with pytest.raises(ValueError, match="chosen must be contiguous int32"):
        api.run_experts(x, weights, chosen.long(), layer)
    with pytest.raises(ValueError, match=r"weights must be contiguous float32 \[3, 2\]"):
        api.run_experts(x, weights[:2], chosen, layer)
    with pytest.raises(ValueError, match="do not go with down"):
        api.run_experts(x, weights, chosen, dataclasses.replace(layer, gate_up=(layer.down,)))
    with pytest.raises(ValueError, match="logits have 5 columns for 6 experts"):
        api.route(torch.zeros(1, 5), api.Routing(6, 2))
