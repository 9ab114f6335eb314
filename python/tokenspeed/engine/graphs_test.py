# SPDX-License-Identifier: MIT
"""Captured decode steps give the tokens of eager ones: every batch size, padded or not, whatever requests ask for.

On a CPU a captured step is its closure, run again over the buffers that a graph would hold; what a graph itself adds
is checked on a GPU (tools/gpu_run.sh).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenspeed_cc
from tokenspeed.config.model import ModelConfig, load_model_config
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine import synthetic
from tokenspeed.engine.device_state import DeviceState
from tokenspeed.engine.graphs import DecodeGraphs, RepeatingSteps
from tokenspeed.engine.pieces import PrefillPieces, RepeatingPieces, sizes_up_to
from tokenspeed.engine.replay import DecodeRecordings
from tokenspeed.engine.runner import Captured, ModelRunner, NewSlot, StepWork
from tokenspeed.models import load_model
from tokenspeed.models.model import Model
from tokenspeed.sampling import Sampler, SamplerConfig
from tokenspeed_kernel import api

BLOCK, MAX_SEQS, MAX_LEN, BLOCKS = 8, 7, 64, 200
CPU = torch.device("cpu")


@dataclass
class Stepper:
    """A scheduler and a runner, stepped by hand: no loop, no threads, nothing in flight."""

    scheduler: tokenspeed_cc.Scheduler
    runner: ModelRunner
    captured: Captured
    num_played: int = 0
    num_pieces: int = 0
    reports: list[list[float]] = field(default_factory=list)
    """Log-probabilities of the tokens of each step that told them."""

    def run(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
        """The tokens of each request."""
        for index, (prompt, params) in enumerate(requests):
            self.scheduler.submit(
                tokenspeed_cc.RequestSpec(
                    request_id=index,
                    token_ids=np.array(prompt, np.int32),
                    max_new_tokens=params.max_new_tokens or 0,
                    min_new_tokens=0,
                    stop_token_ids=[],
                    ignore_eos=True,
                    priority=0,
                    cache_salt=0,
                    adapter=0,
                )
            )
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs = [params.logprobs for _, params in requests if params.logprobs is not None]
        while (plan := self.scheduler.plan()) is not None:
            new = [
                NewSlot(
                    slot, requests[request][1], np.array(requests[request][0], np.int32), np.zeros(0, np.int32), None
                )
                for slot, request in zip(plan.new_slots.tolist(), plan.new_slot_request_ids.tolist())
            ]
            decode, prefill = self.captured.decode, self.captured.prefill
            played = decode is not None and decode.fit(plan)
            self.num_played += played
            self.num_pieces += not played and prefill is not None and prefill.fit(int(plan.query_lens.sum()))
            sampled = self.runner.run(StepWork(plan, new, max(logprobs, default=None), []))
            column = np.zeros((plan.num_rows, 1), np.int32)
            if sampled.output is not None:
                column[sampled.sample_rows, 0] = sampled.output.tokens.numpy()
                if sampled.output.token_logprobs is not None:
                    self.reports.append(sampled.output.token_logprobs.tolist())
            outcome = self.scheduler.advance(plan.step_id, column, plan.samples.astype(np.int32))
            for request, row in zip(outcome.request_ids.tolist(), outcome.rows.tolist()):
                tokens[request].append(int(column[row, 0]))
        return tokens


@functools.cache
def loaded(model_folder: str) -> tuple[ModelConfig, Model]:
    source = ModelSource("folder", Path(model_folder), "test")
    config = load_model_config(source)
    return config, load_model(source, config, CPU, torch.float32, "dummy")


def stepper(
    model_folder: str,
    sizes: tuple[int, ...],
    padded: bool = True,
    piece_sizes: tuple[int, ...] = (),
    recorded: tuple[int, ...] = (),
) -> Stepper:
    """Without sizes, every step is eager."""
    config, model = loaded(model_folder)
    scheduler = tokenspeed_cc.Scheduler(
        tokenspeed_cc.SchedulerConfig(
            num_blocks=BLOCKS,
            block_size=BLOCK,
            max_num_seqs=MAX_SEQS,
            max_model_len=MAX_LEN,
            max_batched_tokens=32,
            chunked_prefill=True,
            overlap_depth=0,
            verify_width=1,
            max_decode_gap_tokens=32,
            enable_prefix_caching=True,
            eos_token_ids=[2],
        )
    )
    tables = scheduler.block_tables()
    state = DeviceState(tables.shape[0], tables.shape[1], BLOCK, CPU, mirrored=bool(sizes or piece_sizes))
    sampler = Sampler(SamplerConfig(state.padding_slot + 1, config.vocab_size, CPU, (2,)))
    caches = [tuple(tensor.allocate(BLOCKS, CPU) for tensor in layer) for layer in model.kv_cache(BLOCK)]
    graphs = DecodeGraphs(sizes, padded, state, 2, RepeatingSteps()) if sizes else None
    if graphs is not None:
        graphs.capture(model, sampler, caches)
    pieces = PrefillPieces(piece_sizes, CPU) if piece_sizes else None
    if pieces is not None:
        pieces.capture(model, synthetic.batch_of(state, caches, 0, [1]), caches, RepeatingPieces())
    recordings = DecodeRecordings(recorded, state) if recorded else None
    captured = Captured(graphs, pieces, recordings)
    return Stepper(scheduler, ModelRunner(model, sampler, caches, tables, state, 2, 256, captured), captured)


def requests(count: int, kind: str) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of different lengths; some share their first blocks, so that blocks are copied too."""
    random = np.random.default_rng(count)
    shared = random.integers(3, 300, 12).tolist()
    variants: dict[str, Any] = {
        "greedy": {"temperature": 0.0},
        "drawn": {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.001},
        "penalised": {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
        "reported": {"temperature": 0.8, "logprobs": 2},
    }
    found = []
    for index in range(count):
        name = list(variants)[index % 4] if kind == "mixed" else kind
        prompt = (shared if index % 2 else []) + random.integers(3, 300, 1 + 3 * index).tolist()
        found.append((prompt, SamplingParams(seed=index, max_new_tokens=5 + 2 * index, **variants[name])))
    return found


@pytest.mark.parametrize("kind", ["greedy", "drawn", "penalised", "reported", "mixed"])
@pytest.mark.parametrize("count", range(1, MAX_SEQS + 1))
def test_a_captured_step_gives_the_tokens_of_an_eager_one(tiny_model: str, count: int, kind: str) -> None:
    expected = stepper(tiny_model, ()).run(requests(count, kind))
    played = stepper(tiny_model, (1, 2, 4, MAX_SEQS))
    assert played.run(requests(count, kind)) == expected
    assert played.num_played > 0


@pytest.mark.parametrize("count", [1, 4, MAX_SEQS])
def test_layers_captured_in_pieces_give_the_tokens_of_eager_ones(tiny_model: str, count: int) -> None:
    expected = stepper(tiny_model, ()).run(requests(count, "mixed"))
    pieces = stepper(tiny_model, (), piece_sizes=(1, 5, 32))
    assert pieces.run(requests(count, "mixed")) == expected
    both = stepper(tiny_model, (2, MAX_SEQS), piece_sizes=(32,))
    assert both.run(requests(count, "mixed")) == expected
    assert pieces.num_pieces > both.num_pieces > 0 and both.num_played > 0


def test_pieces_whose_products_add_to_the_residual_give_the_tokens_of_eager_steps(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "adds_within", lambda rows, _weight: len(rows) >= 5)
    expected = stepper(tiny_model, ()).run(requests(4, "greedy"))
    pieces = stepper(tiny_model, (2, MAX_SEQS), piece_sizes=(5, 32))
    assert pieces.run(requests(4, "greedy")) == expected
    assert pieces.num_pieces > 0


def test_sizes_of_pieces_end_at_the_largest_and_pad_by_no_more_than_half() -> None:
    for largest in (16, 17, 100, 2048, 2304, 8192):
        sizes = sizes_up_to(largest)
        assert sizes[-1] == largest and list(sizes) == sorted(set(sizes))
        assert all(above <= 2 * below for below, above in itertools.pairwise(sizes))
    assert sizes_up_to(2304) == (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 2304)


def test_more_rows_than_the_largest_size_run_eagerly(tiny_model: str) -> None:
    expected = stepper(tiny_model, ()).run(requests(6, "mixed"))
    played = stepper(tiny_model, (1, 3))
    assert played.run(requests(6, "mixed")) == expected
    assert played.num_played > 0


def test_without_padding_only_exact_sizes_are_played(tiny_model: str) -> None:
    exact = stepper(tiny_model, (1, 2), padded=False)
    assert exact.run(requests(3, "greedy")) == stepper(tiny_model, ()).run(requests(3, "greedy"))
    # Three rows at first, then two, then one; the shortest request has 5 tokens, the others two more each.
    assert 0 < exact.num_played <= 4


def test_slots_and_tables_survive_requests_that_come_and_go(tiny_model: str) -> None:
    """A second wave gets the slots and blocks of the first, and nothing of its tokens."""
    played, eager = stepper(tiny_model, (2, MAX_SEQS)), stepper(tiny_model, ())
    for count in (5, 7, 2):
        assert played.run(requests(count, "mixed")) == eager.run(requests(count, "mixed"))
