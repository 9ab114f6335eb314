# SPDX-License-Identifier: MIT
"""An engine inside somebody's program: what is passed in, forks, interrupts, and engines that are merely dropped."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.config.sampling import RequestError
from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.offline import Engine

StartEngine = Callable[..., Engine]
GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 900, "ignore_eos": True}


def test_prompts_may_be_objects_with_token_ids(start_engine: StartEngine) -> None:
    engine = start_engine()
    (plain,) = engine.generate([[5, 6, 7]], GREEDY)
    for prompts in ({"prompt_token_ids": [5, 6, 7]}, [{"prompt_token_ids": (5, 6, 7)}]):
        (output,) = engine.generate(prompts, GREEDY)
        assert (output.prompt_token_ids, output.token_ids) == ([5, 6, 7], plain.token_ids)


@pytest.mark.parametrize(
    "prompts",
    [
        {"prompt_token_ids": [5], "multi_modal_data": {}},
        {"prompt_token_ids": 5},
        {"text": "hello"},
        {},
        b"hello",
        7,
        [None],
        [[5.0]],
        [[True]],
        [[[5]]],
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_by_name(start_engine: StartEngine, prompts: Any) -> None:
    with pytest.raises(RequestError) as raised:
        start_engine().generate(prompts, GREEDY)
    assert raised.value.field == "prompt"


@pytest.mark.parametrize("params", ["greedy", 5, [5], [GREEDY, GREEDY], iter([GREEDY]), [[GREEDY]]], ids=repr)
def test_what_are_no_parameters_is_refused_by_name(start_engine: StartEngine, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params") as raised:
        start_engine().generate([[5, 6]], params)
    assert raised.value.field == "sampling_params"


def test_an_iterator_of_prompts_that_fails_costs_nothing(start_engine: StartEngine) -> None:
    engine = start_engine()

    def prompts() -> Iterator[list[int]]:
        yield [5, 6]
        raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        engine.generate(prompts(), GREEDY)
    assert engine.load().num_running == engine.load().num_waiting == 0


def test_an_interrupt_ends_the_requests_and_the_engine_goes_on(start_engine: StartEngine) -> None:
    engine = start_engine()

    def interrupt() -> None:
        wait_until(lambda: engine.load().num_running > 0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5, 6, 7]] * 4, ENDLESS)
    thread.join()
    wait_until(lambda: engine.load().active_blocks == 0)
    assert len(engine.generate([[5, 6, 7]], GREEDY)[0].token_ids) == 4


def test_a_forked_process_is_told_that_it_has_no_engine(start_engine: StartEngine) -> None:
    engine = start_engine()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def ask() -> None:
        try:
            engine.generate([[5, 6]], GREEDY)
        except EngineDeadError as error:
            theirs.send(str(error))

    child = context.Process(target=ask)
    child.start()
    try:
        assert ours.poll(60), "the child waits for an engine that it does not have"
        assert "forked" in ours.recv()
    finally:
        child.kill()
        child.join()
    assert len(engine.generate([[5, 6]], GREEDY)[0].token_ids) == 4


def test_an_engine_that_is_dropped_ends_its_threads(tiny_model: str) -> None:
    before = set(threading.enumerate())
    options = {"load_format": "dummy", "device": "cpu", "num_threads": 1, "skip_tokenizer_init": True}
    engine = Engine(tiny_model, max_total_tokens=512, log_level="error", **options)
    dropped = weakref.ref(engine)
    engine.generate([[5, 6]], GREEDY)
    del engine
    gc.collect()
    assert dropped() is None
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_engines_in_one_process_do_not_mind_each_other(start_engine: StartEngine) -> None:
    first, second = start_engine(), start_engine()
    expected = first.generate([[5, 6, 7]], GREEDY)[0].token_ids
    first.shutdown()
    first.shutdown()
    assert second.generate([[5, 6, 7]], GREEDY)[0].token_ids == expected
    with pytest.raises(EngineDeadError):
        first.generate([[5, 6]], GREEDY)
