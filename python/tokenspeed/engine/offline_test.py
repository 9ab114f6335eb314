# SPDX-License-Identifier: MIT
"""The whole engine in process, on a tiny random model: the same tokens however steps are cut, and nothing leaks."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config.flags import FlagError
from tokenspeed.config.sampling import RequestError, SamplingParams, derive_seed
from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.offline import Engine

StartEngine = Callable[..., Engine]

PROMPTS = [[(7 * start + 3 * step) % 317 + 3 for step in range(5 + 11 * start)] for start in range(6)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
DRAWN = {"temperature": 1.3, "seed": 11, "max_new_tokens": 12, "ignore_eos": True}


def tokens(engine: Engine, params: dict[str, Any], prompts: list[list[int]] | None = None) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompts or PROMPTS, params)]


def check_idle(engine: Engine) -> None:
    """Wait until the loop has settled everything; then no block is held and the scheduler's invariants hold."""
    deadline = time.monotonic() + 10
    while engine.load().active_blocks or engine.load().num_running:
        assert time.monotonic() < deadline, engine.load()
        time.sleep(0.005)
    assert engine._core is not None
    loop = engine._core.loop
    engine.shutdown()
    loop.scheduler.check()
    assert not loop.requests


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_depth": 0},
        {"chunked_prefill_size": 16},
        {"chunked_prefill_size": 33, "overlap_depth": 0, "max_decode_gap": 7},
        {"chunked_prefill_size": -1},
        {"block_size": 8},
        {"block_size": 256},
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False},
        # A pool that cannot hold all requests at once: some wait or are retracted, and resume exactly.
        {"max_total_tokens": 160},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_steps_are_cut(start_engine: StartEngine, options: dict[str, Any]) -> None:
    plain, other = start_engine(), start_engine(**options)
    for params in (GREEDY, DRAWN):
        expected = tokens(plain, params)
        assert tokens(other, params) == expected
        assert tokens(other, params) == expected, "and not on what the cache holds"
    check_idle(other)


def test_a_request_alone_equals_itself_in_a_batch_and_n_seeds_are_the_derived_ones(start_engine: StartEngine) -> None:
    engine = start_engine()
    batch = tokens(engine, DRAWN)
    assert batch == [tokens(engine, DRAWN, [prompt])[0] for prompt in PROMPTS]
    many = engine.generate([PROMPTS[1]], {**DRAWN, "n": 4})[0]
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in many.choices}) == 4
    for choice in many.choices:
        single = engine.generate([PROMPTS[1]], {**DRAWN, "seed": derive_seed(11, choice.index)})[0]
        assert single.token_ids == choice.token_ids


def test_requests_without_a_seed_differ_and_the_engines_seed_makes_them_repeatable(start_engine: StartEngine) -> None:
    free = {"temperature": 2.0, "max_new_tokens": 12, "ignore_eos": True}
    engine = start_engine(seed=5)
    first = tokens(engine, free, [PROMPTS[0]] * 4)
    assert len({tuple(ids) for ids in first}) == 4
    assert tokens(start_engine(seed=5), free, [PROMPTS[0]] * 4) == first
    assert tokens(start_engine(seed=6), free, [PROMPTS[0]] * 4) != first


def test_a_repeated_prompt_is_cached_but_for_its_last_token(start_engine: StartEngine) -> None:
    engine = start_engine(block_size=8)
    prompt = PROMPTS[5]
    cold = engine.generate([prompt], GREEDY)[0]
    warm = engine.generate([prompt], GREEDY)[0]
    assert cold.cached_tokens == 0
    assert len(prompt) - 8 <= warm.cached_tokens < len(prompt)
    assert warm.token_ids == cold.token_ids


def test_logprobs_are_sorted_sum_to_less_than_one_and_are_per_request(start_engine: StartEngine) -> None:
    engine = start_engine()
    params = [{**GREEDY, "logprobs": 3}, GREEDY, {**GREEDY, "logprobs": 0}]
    rich, plain, sampled_only = engine.generate(PROMPTS[:3], params)
    assert plain.logprobs is None
    assert rich.logprobs is not None and len(rich.logprobs) == 12
    for entry, token in zip(rich.logprobs, rich.token_ids, strict=True):
        assert entry.token_id == token and len(entry.top) == 3
        assert entry.top[0] == (token, entry.logprob), "the greedy token is the likeliest"
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
    assert sampled_only.logprobs is not None and all(not entry.top for entry in sampled_only.logprobs)


def test_a_stop_token_ends_the_request_and_is_its_last_token(start_engine: StartEngine) -> None:
    engine = start_engine()
    whole = tokens(engine, GREEDY, [PROMPTS[2]])[0]
    stop = whole[5]
    output = engine.generate([PROMPTS[2]], {**GREEDY, "stop_token_ids": [stop]})[0]
    assert output.token_ids == whole[: whole.index(stop) + 1]
    assert output.finish_reason == "stop" and output.choices[0].stop_match == stop
    held_back = engine.generate([PROMPTS[2]], {**GREEDY, "stop_token_ids": [stop], "min_new_tokens": 12})[0]
    assert len(held_back.token_ids) == 12 and held_back.finish_reason == "length"


def test_a_lone_prompt_and_a_list_of_prompts_both_give_a_list(start_engine: StartEngine) -> None:
    engine = start_engine()
    assert engine.generate(PROMPTS[0], GREEDY)[0].token_ids == engine.generate([PROMPTS[0]], GREEDY)[0].token_ids
    assert engine.generate([], GREEDY) == []


@pytest.mark.parametrize("prompts", [None, 5])
def test_what_is_neither_a_prompt_nor_several_is_refused_by_name(start_engine: StartEngine, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts must be texts or lists of token ids") as caught:
        start_engine().generate(prompts, GREEDY)
    assert (caught.value.field, caught.value.code) == ("prompt", "invalid_type")


@pytest.mark.parametrize(
    ("prompt", "params", "field", "code"),
    [
        ([5] * 64, {}, "prompt", "context_length_exceeded"),
        ([5] * 60, {"max_new_tokens": 5}, "prompt", "context_length_exceeded"),
        ([], {}, "prompt", "empty_prompt"),
        ([320], {}, "prompt", "invalid_token_id"),
        ([2**40], {}, "prompt", "invalid_token_id"),
        ([1.5], {}, "prompt", "invalid_type"),
        ("text", {}, "prompt", "unsupported"),
        ([5], {"logit_bias": {320: 1.0}}, "logit_bias", "invalid_value"),
        ([5], {"temperature": float("nan")}, "temperature", "invalid_value"),
        ([5], {"stop": "x"}, "stop", "unsupported"),
        ([5], {"best_of_n": 2}, "best_of_n", "unknown_parameter"),
        ([5], {"best_of": 2, "n": 3}, "best_of", "invalid_value"),
        ([5], {"logits_processor": print}, "logits_processor", "unsupported"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_request_is_refused_by_field_and_the_next_one_works(
    start_engine: StartEngine, prompt: Any, params: dict[str, Any], field: str, code: str
) -> None:
    engine = start_engine(max_model_len=64)
    with pytest.raises(RequestError) as caught:
        engine.generate([prompt, [5]], params)
    assert (caught.value.field, caught.value.code) == (field, code)
    assert len(engine.generate([[5, 6]], {"max_new_tokens": 3, "ignore_eos": True})[0].token_ids) == 3


def test_a_prompt_larger_than_the_pool_is_refused_at_admission(start_engine: StartEngine) -> None:
    engine = start_engine(max_total_tokens=64)
    with pytest.raises(RequestError) as caught:
        engine.generate([[5] * 200], {"max_new_tokens": 4})
    assert caught.value.code == "request_too_large"
    assert len(engine.generate([[5, 6]], {"max_new_tokens": 3, "ignore_eos": True})[0].token_ids) == 3
    check_idle(engine)


@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_aborts_at_random_points_return_every_block_and_end_every_request_once(
    start_engine: StartEngine, overlap_depth: int
) -> None:
    engine = start_engine(overlap_depth=overlap_depth, max_total_tokens=640, chunked_prefill_size=24)
    choices = random.Random(overlap_depth)
    ends: dict[str, int] = {}
    done = threading.Event()
    total = 60

    def take(deltas: Any) -> None:
        for delta in deltas:
            if delta.finish:
                ends[delta.rid] = ends.get(delta.rid, 0) + 1
        if len(ends) == total:
            done.set()

    for index in range(total):
        params = {"max_new_tokens": choices.randrange(1, 40), "seed": index, "ignore_eos": True}
        prompt = [3 + index % 7] * choices.randrange(1, 80)
        job = engine.job(prompt, params)
        engine.frontend.submit(job.requests, take)
        time.sleep(choices.random() * 0.004)
        if choices.random() < 0.7:
            engine.frontend.abort([job.requests[0].rid])
    assert done.wait(30)
    assert set(ends.values()) == {1}
    check_idle(engine)


def test_several_threads_share_one_engine(start_engine: StartEngine) -> None:
    engine = start_engine()
    expected = tokens(engine, DRAWN)
    results: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda index=index: results.update({index: tokens(engine, DRAWN, [PROMPTS[index]])}))
        for index in range(len(PROMPTS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [results[index][0] for index in range(len(PROMPTS))] == expected


def test_a_dying_loop_tells_the_waiting_caller_and_every_later_one(start_engine: StartEngine) -> None:
    engine = start_engine(overlap_depth=0)

    def broken(_batch: Any) -> Any:
        raise FloatingPointError("a kernel fell over")

    engine._core.executor._runner._model.hidden = broken  # type: ignore[union-attr]
    with pytest.raises(EngineDeadError, match="a kernel fell over"):
        engine.generate([[5]], GREEDY)
    with pytest.raises(EngineDeadError):
        engine.generate([[5]], GREEDY)


def held_by(engine: Engine) -> dict[str, weakref.ref[Any]]:
    """What takes memory in a running engine, without keeping it."""
    assert engine._core is not None
    runner: Any = engine._core.executor._runner  # type: ignore[attr-defined]
    parts = {"loop": engine._core.loop, "model": runner._model, "sampler": runner._sampler, "kv": runner._caches[0][0]}
    return {name: weakref.ref(part) for name, part in parts.items()}


@pytest.mark.parametrize("options", [{}, {"overlap_depth": 0}], ids=str)
def test_a_stopped_engine_holds_no_memory(start_engine: StartEngine, options: dict[str, Any]) -> None:
    engine = start_engine(**options)
    engine.generate(PROMPTS, DRAWN)
    held = held_by(engine)
    gc.collect()
    gc.disable()  # no cycle may be left that waits for a collection: the next engine needs the memory now
    try:
        engine.shutdown()
        assert [name for name, part in held.items() if part() is not None] == []
    finally:
        gc.enable()
    assert engine.late_compiles == 0
    with pytest.raises(EngineDeadError):
        engine.load()
    with pytest.raises(EngineDeadError):
        engine.generate([[5]], GREEDY)


def test_a_stopped_engine_with_ports_leaves_no_thread(start_engine: StartEngine) -> None:
    before = set(threading.enumerate())
    engine = start_engine(enable_metrics=True, rl_control_port=0)
    engine.generate(PROMPTS, DRAWN)
    held = held_by(engine)
    engine.shutdown()
    gc.collect()
    assert [name for name, part in held.items() if part() is not None] == []
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name


def test_an_engine_that_died_holds_no_memory_once_it_is_shut_down(start_engine: StartEngine) -> None:
    engine = start_engine(overlap_depth=0)
    held = held_by(engine)

    def broken(_batch: Any) -> Any:
        raise FloatingPointError("a kernel fell over")

    engine._core.executor._runner._model.hidden = broken  # type: ignore[union-attr]
    with pytest.raises(EngineDeadError) as raised:
        engine.generate([[5]], GREEDY)
    engine.shutdown()
    gc.collect()
    assert [name for name, part in held.items() if part() is not None] == []
    assert isinstance(raised.value.__cause__, FloatingPointError)


def test_shutdown_ends_who_waits_and_may_be_called_twice(start_engine: StartEngine) -> None:
    engine = start_engine(max_model_len=1024)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            engine.generate([[5]], {"max_new_tokens": 1000, "ignore_eos": True})
        except EngineDeadError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not engine.load().num_running:
        time.sleep(0.001)
    engine.shutdown()
    engine.shutdown()
    thread.join(10)
    assert len(caught) == 1


def test_unknown_options_and_models_are_refused_by_name(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="max_modl_len"):
        Engine(tiny_model, max_modl_len=5)
    with pytest.raises(ValueError, match="nowhere"):
        Engine(str(tmp_path / "nowhere"))


def test_preferred_parameters_are_for_those_who_do_not_say_them(start_engine: StartEngine) -> None:
    plain = start_engine()
    engine = start_engine(preferred_sampling_params='{"temperature": 0, "repetition_penalty": 1.3}')
    rest = {"max_new_tokens": 8, "ignore_eos": True, "seed": 3}
    preferred = {"temperature": 0, "repetition_penalty": 1.3, **rest}
    assert tokens(engine, rest, PROMPTS[:2]) == tokens(plain, preferred, PROMPTS[:2])
    asked = {**rest, "temperature": 2.0, "repetition_penalty": 1.0}
    assert tokens(engine, asked, PROMPTS[:2]) == tokens(plain, asked, PROMPTS[:2])


def test_values_of_the_configuration_may_be_overridden(start_engine: StartEngine) -> None:
    engine = start_engine(hf_overrides='{"max_position_embeddings": 64, "num_hidden_layers": 1}')
    assert engine.config.scheduler.max_model_len == 64 and engine.model_config.num_layers == 1
    assert len(engine.generate([PROMPTS[0][:8]], GREEDY)[0].token_ids) > 0
    with pytest.raises(FlagError, match="--hf-overrides: not JSON"):
        start_engine(hf_overrides="{")


def test_a_pool_without_room_names_the_flag(start_engine: StartEngine) -> None:
    with pytest.raises(ValueError, match="--kv-cache-gib"):
        start_engine(max_total_tokens=None, kv_cache_gib=1e-7)


@pytest.mark.parametrize("override", ["attention.paged=nope", "nope=x", "foo"])
def test_a_kernel_that_does_not_exist_is_refused_by_flag(start_engine: StartEngine, override: str) -> None:
    with pytest.raises(FlagError, match="--kernel-override"):
        start_engine(kernel_override=override)


def test_sampling_params_may_differ_by_prompt_but_must_be_as_many(start_engine: StartEngine) -> None:
    engine = start_engine()
    short, long = SamplingParams(max_new_tokens=2, ignore_eos=True), SamplingParams(max_new_tokens=5, ignore_eos=True)
    assert [len(output.token_ids) for output in engine.generate(PROMPTS[:2], [short, long])] == [2, 5]
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        engine.generate(PROMPTS[:2], [short])


def test_a_shared_object_of_parameters_is_read_again_at_every_call(start_engine: StartEngine) -> None:
    engine = start_engine()
    shared: dict[str, Any] = {"max_new_tokens": 2, "ignore_eos": True}
    other = {"max_new_tokens": 3, "ignore_eos": True}
    outputs = engine.generate(PROMPTS[:3], [shared, other, shared])
    assert [len(output.token_ids) for output in outputs] == [2, 3, 2]
    shared["max_new_tokens"] = 4
    assert [len(output.token_ids) for output in engine.generate(PROMPTS[:2], shared)] == [4, 4]
    shared["top_p"] = 2.0
    with pytest.raises(RequestError, match="top_p"):
        engine.generate(PROMPTS[:2], [other, shared])


def test_logprobs_of_a_prompt_do_not_depend_on_chunks_or_the_cache(start_engine: StartEngine) -> None:
    prompt = [number * 13 % 300 for number in range(45)]
    params = {"temperature": 0, "max_new_tokens": 3, "prompt_logprobs": 2, "logprobs": 2}
    told = []
    for chunk, depth, scored in ((16, 1, 256), (512, 0, 7)):
        options = {"chunked_prefill_size": chunk, "overlap_depth": depth, "input_logprob_chunk_tokens": scored}
        engine = start_engine(max_num_seqs=4, **options)
        first, again = engine.generate([prompt], params)[0], engine.generate([prompt], {**params, "n": 2})[0]
        assert first.prompt_logprobs == again.prompt_logprobs
        later = engine.generate([prompt], {**params, "prompt_logprob_start": 30})[0]
        assert first.prompt_logprobs is not None and later.prompt_logprobs == first.prompt_logprobs[30:]
        told.append(first)
    assert told[0].prompt_logprobs == told[1].prompt_logprobs
    scores = told[0].prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == len(prompt)
    assert [entry.token_id for entry in scores if entry] == prompt[1:]
    # The generated tokens of one request, as the prompt of another, are worth the same.
    output, logprobs = told[0].token_ids, told[0].logprobs
    assert logprobs is not None
    whole = start_engine(max_num_seqs=4).generate([prompt + output], params)[0].prompt_logprobs
    assert whole is not None and whole[len(prompt) :] == logprobs


def test_a_prompt_as_long_as_the_pool_that_shares_a_part_of_a_block_is_answered(start_engine: StartEngine) -> None:
    """The block that its shared part would be copied from is the one that it needs."""
    engine = start_engine(max_total_tokens=64, block_size=16)
    first = [7 + i for i in range(56)]
    second = first[:52] + [300] * 4
    for prompt in (first, second, first):
        assert len(engine.generate([prompt], {"max_new_tokens": 2, "ignore_eos": True})[0].token_ids) == 2
