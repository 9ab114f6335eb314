# SPDX-License-Identifier: MIT
"""Made-up steps stay inside the limits and reach what they are for; on a CPU they run through a real model too."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.config.resolve import SchedulerLimits
from tokenspeed.engine import synthetic
from tokenspeed.engine.device_state import DeviceState
from tokenspeed.engine.graphs_test import loaded


def limits(max_num_seqs: int, max_batched_tokens: int, max_model_len: int) -> SchedulerLimits:
    return SchedulerLimits(8, max_num_seqs, max_model_len, max_batched_tokens, True, 1, 256, True, ())


@pytest.mark.parametrize("shape", [(1, 8, 64), (7, 64, 64), (256, 8192, 4096), (256, 257, 4096), (3, 8192, 100)])
def test_steps_stay_inside_the_limits(shape: tuple[int, int, int]) -> None:
    allowed = limits(*shape)
    steps = [(0, synthetic.widest(allowed)), *synthetic.every_kind(allowed, routed=True)]
    for num_decodes, query_lens in steps:
        assert 0 < num_decodes + len(query_lens) <= allowed.max_num_seqs
        assert num_decodes + sum(query_lens) <= allowed.max_batched_tokens
        assert all(1 <= length <= allowed.max_model_len for length in query_lens)


def test_the_widest_step_has_every_token_and_every_row() -> None:
    widest = synthetic.widest(limits(256, 8192, 4096))
    assert len(widest) == 256 and sum(widest) == 8192


def test_every_kind_covers_powers_of_two_of_decodes_and_each_tile_beside_decodes() -> None:
    kinds = list(synthetic.every_kind(limits(40, 512, 400), routed=False))
    assert {decodes for decodes, lens in kinds if not lens} == {1, 2, 4, 8, 16, 32, 40}
    assert {decodes for decodes, lens in kinds if lens} == {0, 1, 2, 16}
    tokens = [decodes + sum(lens) for decodes, lens in kinds if lens]
    assert any(count % 16 == 0 for count in tokens) and any(count % 16 for count in tokens)


def test_steps_of_a_mixture_of_experts_double_their_tokens_up_to_the_budget() -> None:
    allowed = limits(40, 5000, 400)
    more = list(synthetic.every_kind(allowed, routed=True))[len(list(synthetic.every_kind(allowed, routed=False))) :]
    assert [(decodes, sum(lens)) for decodes, lens in more] == [(0, tokens) for tokens in (256, 512, 1024, 2048, 4096)]


def test_a_made_up_step_runs_and_touches_block_zero_alone(tiny_model: str) -> None:
    _, model = loaded(tiny_model)
    state = DeviceState(4, 8, 8, torch.device("cpu"), mirrored=True)
    caches = [tuple(tensor.allocate(3, state.device) for tensor in layer) for layer in model.kv_cache(8)]
    logits = model.forward(synthetic.batch_of(state, caches, 2, [5, 3]))
    assert logits.shape == (4, 320) and bool(logits.isfinite().all())
    assert all(bool((tensor[1:] == 0).all()) and bool((tensor[0] != 0).any()) for layer in caches for tensor in layer)
