# SPDX-License-Identifier: MIT
"""Decode steps that are played back on a CPU give the bits of those that are run, or are not played."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.engine.graphs_test import MAX_SEQS, Stepper, loaded, requests, stepper
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.replay import DecodeRecordings
from tokenspeed.engine.testing import PROMPT, checkpoint
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.models.model import Hidden, Model
from tokenspeed.models.testing import MODELS, SMALL

StartEngine = Callable[..., Engine]
SIZES = tuple(range(1, MAX_SEQS + 1))
DRAWN = {"temperature": 1.1, "seed": 5, "max_new_tokens": 24, "ignore_eos": True, "logprobs": 2}


def recorded(model_folder: str, sizes: tuple[int, ...] = SIZES) -> tuple[Stepper, DecodeRecordings]:
    played = stepper(model_folder, (), recorded=sizes)
    assert played.captured.recordings is not None
    return played, played.captured.recordings


def same(played: Stepper, run: Stepper, count: int, kind: str) -> bool:
    """Whether both give the tokens, and where requests want them the log-probabilities, to the bit."""
    asked = requests(count, kind)
    return played.run(asked) == run.run(asked) and played.reports == run.reports


@pytest.mark.parametrize("kind", ["greedy", "drawn", "penalised", "reported", "mixed"])
@pytest.mark.parametrize("count", SIZES)
def test_a_played_step_gives_the_bits_of_one_that_is_run(tiny_model: str, count: int, kind: str) -> None:
    played, recordings = recorded(tiny_model)
    assert same(played, stepper(tiny_model, ()), count, kind)
    assert 1 in recordings.played and recordings.refused is None


def test_requests_that_come_and_go_find_nothing_of_those_before(tiny_model: str) -> None:
    """The second time every size is played from its first step on; prompts that were there are hits in the cache."""
    (played, recordings), run = recorded(tiny_model), stepper(tiny_model, ())
    assert all(same(played, run, count, "mixed") for count in (5, 7, 2, 7))
    assert {2, 5, 7} <= recordings.played


def test_only_the_sizes_asked_for_are_played(tiny_model: str) -> None:
    played, recordings = recorded(tiny_model, (2,))
    assert same(played, stepper(tiny_model, ()), 3, "reported")
    assert recordings.played == {2}


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_gives_the_bits_of_steps_that_are_run(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL | {"vocab_size": 320, "eos_token_id": 2} | MODELS[name]))
    played, recordings = recorded(str(folder))
    assert same(played, stepper(str(folder), ()), 4, "reported")
    why = {"gemma": "aten.mul.Tensor is none of our kernels"}.get(name)
    assert recordings.refused == why and bool(recordings.played) == (why is None)


class Unseen(Model):
    """Flips the sign of a hidden state behind torch's back, as a kernel of somebody else may."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def hidden(self, batch: ForwardBatch) -> Hidden:
        x, residual = self.model.hidden(batch)
        numbers = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
        for at in range(len(numbers)):
            numbers[at] = -numbers[at]
        return x, residual

    def logits(self, hidden: Hidden, batch: ForwardBatch) -> torch.Tensor:
        return self.model.logits(hidden, batch)


class Doubled(Unseen):
    """Gives other logits by kernels alone."""

    def hidden(self, batch: ForwardBatch) -> Hidden:
        x, residual = self.model.hidden(batch)
        return x + x, residual


class Reading(Unseen):
    """Looks at its inputs in Python."""

    def hidden(self, batch: ForwardBatch) -> Hidden:
        return self.model.hidden(batch) if batch.positions.tolist() else ()


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Unseen, "a part of the model was not seen"), (Reading, "torch.Tensor.tolist is none of our kernels")],
)
def test_a_model_that_does_more_than_call_kernels_is_not_played(tiny_model: str, kind: type[Unseen], why: str) -> None:
    model = kind(loaded(tiny_model)[1])
    (played, recordings), run = recorded(tiny_model), stepper(tiny_model, ())
    played.runner.replace_model(model)
    run.runner.replace_model(model)
    assert same(played, run, 2, "reported")
    assert recordings.refused == why and not recordings.played


def test_another_model_is_recorded_anew(tiny_model: str) -> None:
    (played, recordings), run = recorded(tiny_model), stepper(tiny_model, ())
    model = loaded(tiny_model)[1]
    assert same(played, run, 2, "reported") and recordings.played == {1, 2}
    for other, refused in ((Doubled(model), False), (Unseen(model), True), (model, False)):
        for one in (played, run):
            one.runner.replace_model(other)
        assert not recordings.played and recordings.refused is None
        assert same(played, run, 2, "reported") and bool(recordings.refused) == refused


def test_steps_under_torchs_profiler_are_run(tiny_model: str) -> None:
    played, recordings = recorded(tiny_model)
    with torch.profiler.profile():
        played.run(requests(2, "greedy"))
    assert not recordings.played and recordings.refused is None


def answers(engine: Engine) -> list[Any]:
    """Of a batch, and of each alone, with the prefix of the one before; tokens and log-probabilities, to the bit."""
    prompts = [PROMPT, PROMPT[:20], [*PROMPT, 7]]
    found = [(output.token_ids, output.logprobs) for output in engine.generate(prompts, DRAWN)]
    alone = [engine.generate([prompt], DRAWN)[0] for prompt in prompts]
    return [*found, *((output.token_ids, output.logprobs) for output in alone)]


def test_an_engine_answers_as_one_that_runs_every_step(start_engine: StartEngine, tmp_path: Path) -> None:
    """Before and after other weights come, and when it has slept."""
    first, second = (checkpoint(tmp_path / name, seed) for seed, name in enumerate(("first", "second")))
    options: dict[str, Any] = {"model": first, "load_format": "auto"}
    run = start_engine(enforce_eager=True, **options)
    played = start_engine(enable_memory_saver=True, rl_control_port=0, **options)
    before = answers(run)
    assert answers(played) == before
    played.sleep()
    played.wake_up()
    assert answers(played) == before
    for engine in (run, played):
        engine.update_weights_from_disk(second)
    assert answers(played) == answers(run) != before
