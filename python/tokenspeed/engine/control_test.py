# SPDX-License-Identifier: MIT
"""The control endpoints through a running engine and real connections: what they do, and what they refuse."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tokenspeed.config.control_paths import ABSENT_PATHS
from tokenspeed.engine.testing import (
    ENDLESS,
    GREEDY,
    PROMPT,
    Running,
    StartEngine,
    answer_of,
    ask,
    checkpoint,
    halves,
    packed,
    start,
)


def test_it_tells_what_it_is(start_engine: StartEngine, tiny_model: str) -> None:
    engine = start(start_engine, weight_version="v0")
    assert ask(engine, "/health") == (200, {"status": "ok"})
    status, facts = ask(engine, "/get_server_info")
    assert status == 200 and facts["max_model_len"] == 1024 and facts["num_blocks"] == engine.load().total_blocks
    assert ask(engine, "/model_info") == (200, {"model_path": tiny_model, "weight_version": "v0"})
    assert ask(engine, "/get_weight_version") == (200, {"weight_version": "v0"})
    assert ask(engine, "/v1/loads")[1] == {
        "loads": [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_pages": 0}]
    }


@pytest.mark.parametrize(("asked", "active"), [("auto", "cpu"), ("greedy", "greedy")])
def test_it_tells_what_draws_tokens_and_not_what_was_asked_for(
    start_engine: StartEngine, asked: str, active: str
) -> None:
    engine = start(start_engine, sampling_backend=asked)
    assert ask(engine, "/get_server_info")[1]["sampling_backend"] == active


@pytest.mark.parametrize("path", ABSENT_PATHS)
def test_what_is_not_there_is_refused_by_name(start_engine: StartEngine, path: str) -> None:
    engine = start(start_engine)
    bodies: list[dict[str, Any] | None] = [None, {}]
    for body in bodies:
        status, answer = ask(engine, path, body)
        assert status == 501 and path in answer["message"]


def test_with_a_key_only_health_and_metrics_are_open(start_engine: StartEngine) -> None:
    engine = start(start_engine, rl_control_api_key="s3cret")
    assert ask(engine, "/health")[0] == 200
    assert ask(engine, "/flush_cache", {})[0] == ask(engine, "/flush_cache", {}, key="other")[0] == 401
    assert ask(engine, "/flush_cache", {}, key="s3cret")[0] == 200
    metrics = f"http://127.0.0.1:{engine.ports.control_port}/metrics"
    with urllib.request.urlopen(metrics, timeout=10) as response:
        assert b"tokenspeed:num_requests_total" in response.read()


def test_the_cache_is_flushed_when_idle_and_kept_while_a_request_runs(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    answer_of(engine)
    running = Running(engine).begun()
    status, answer = ask(engine, "/flush_cache", {})
    assert status == 409 and "running" in answer["message"]
    assert engine.generate([PROMPT], GREEDY)[0].cached_tokens > 0
    ask(engine, "/abort_request", {"abort_all": True})
    running.end()
    deadline = time.monotonic() + 10
    while ask(engine, "/flush_cache")[0] != 200:
        assert time.monotonic() < deadline
    assert engine.generate([PROMPT], GREEDY)[0].cached_tokens == 0


def test_pausing_to_keep_freezes_a_request_and_it_goes_on_with_the_same_tokens(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    expected = engine.generate([PROMPT], ENDLESS)[0].token_ids
    running = Running(engine).begun()
    assert ask(engine, "/pause_generation", {"mode": "keep"})[0] == 200
    before = running.num_tokens
    time.sleep(0.3)
    assert running.num_tokens == before < 900 and not running.finish
    assert ask(engine, "/v1/loads")[1]["loads"][0]["num_reqs"] == 1
    assert ask(engine, "/continue_generation", {})[0] == 200
    assert running.end() == "length" and running.num_tokens == len(expected) == 900


def test_pausing_to_wait_lets_the_running_finish_and_queues_the_new(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    running = Running(engine, GREEDY).begun()
    assert ask(engine, "/pause_generation", {})[0] == 200
    assert running.end() == "length"
    waiting = Running(engine, GREEDY)
    time.sleep(0.3)
    assert waiting.num_tokens == 0
    assert ask(engine, "/flush_cache", {})[0] == 200  # it holds nothing yet
    ask(engine, "/continue_generation", {})
    assert waiting.end() == "length"


def test_pausing_to_abort_ends_everyone_and_queues_the_new(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    running = [Running(engine).begun(), Running(engine).begun()]
    assert ask(engine, "/pause_generation", {"mode": "abort"})[0] == 200
    assert [request.end() for request in running] == ["abort", "abort"]
    waiting = Running(engine, GREEDY)
    time.sleep(0.1)
    assert waiting.num_tokens == 0
    ask(engine, "/continue_generation", {})
    assert waiting.end() == "length"


def test_a_pause_of_an_unknown_mode_pauses_nothing(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    status, answer = ask(engine, "/pause_generation", {"mode": "nap"})
    assert status == 400 and "nap" in answer["message"]
    assert len(answer_of(engine)) == 8


def test_one_request_is_aborted_by_its_id_and_its_neighbour_goes_on(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    first, second = Running(engine).begun(), Running(engine).begun()
    assert ask(engine, "/abort_request", {"rid": first.rid})[1]["num_aborted"] == 1
    assert first.end() == "abort"
    # A choice's id is its request's with a number behind it.
    assert ask(engine, "/abort", {"request_id": second.rid.rpartition("-")[0]})[1]["num_aborted"] == 1
    assert second.end() == "abort"
    assert ask(engine, "/abort_request", {"rid": first.rid})[1]["num_aborted"] == 0
    status, answer = ask(engine, "/abort_request", {})
    assert status == 400 and "rid" in answer["message"]


def test_a_new_name_of_the_weights_separates_the_prefix_cache(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    answer = answer_of(engine)
    assert ask(engine, "/update_weight_version", {"new_version": "v2"})[0] == 200
    assert ask(engine, "/get_weight_version")[1] == {"weight_version": "v2"}
    again = engine.generate([PROMPT], GREEDY)[0]
    assert (again.token_ids, again.cached_tokens) == (answer, 0)
    ask(engine, "/update_weight_version", {"new_version": "v2"})
    assert engine.generate([PROMPT], GREEDY)[0].cached_tokens > 0
    status, refused = ask(engine, "/update_weight_version", {"new_version": 3})
    assert status == 400 and "new_version" in refused["message"]


@pytest.mark.parametrize(("depth", "ranks"), [(0, 1), (1, 1), (1, 2)])
def test_new_weights_answer_as_an_engine_that_started_with_them(
    start_engine: StartEngine, tmp_path: Path, depth: int, ranks: int
) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    options: dict[str, Any] = {"load_format": "auto", "overlap_depth": depth, "tensor_parallel_size": ranks}
    expected = answer_of(start_engine(model=new, **options))
    engine = start(start_engine, model=old, **options)
    before = answer_of(engine)
    assert before != expected
    running = Running(engine).begun()
    body = {"model_path": new, "weight_version": "step-2"}
    assert ask(engine, "/update_weights_from_disk", body)[0] == 200
    assert ask(engine, "/model_info")[1] == {"model_path": new, "weight_version": "step-2"}
    after = engine.generate([PROMPT], GREEDY)[0]
    assert (after.token_ids, after.cached_tokens) == (expected, 0)  # the old blocks of this prompt are not for it
    assert after.weight_version == "step-2"
    assert running.end() == "length" and running.num_tokens == 900  # who ran through the change went on
    assert running.versions == ["default", "step-2"]
    assert answer_of(engine) == expected
    assert ask(engine, "/update_weights_from_disk", {"model_path": old})[0] == 200
    assert ask(engine, "/get_weight_version")[1] == {"weight_version": "step-2"}  # a name is kept unless given
    assert answer_of(engine) == before


@pytest.mark.parametrize(("ranks", "quantization"), [(1, None), (2, None), (1, "fp8")])
def test_an_update_that_fails_changes_nothing(
    start_engine: StartEngine, tmp_path: Path, ranks: int, quantization: str | None
) -> None:
    old = checkpoint(tmp_path / "old", 1)
    deeper = checkpoint(tmp_path / "deeper", 2, num_hidden_layers=3)
    broken = checkpoint(tmp_path / "broken", 3)
    with open(f"{broken}/model.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) - 5000)
    options: dict[str, Any] = {"tensor_parallel_size": ranks, "quantization": quantization}
    engine = start(start_engine, model=old, load_format="auto", weight_version="v1", **options)
    before = answer_of(engine)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model_path": deeper, "weight_version": "v2"}, "num_layers is 3 and the engine's is 2"),
        ({"model_path": broken, "weight_version": "v2"}, "broken"),
        ({"model_path": str(tmp_path / "nowhere"), "weight_version": "v2"}, "nowhere"),
        ({"weight_version": "v2"}, "model_path"),
        ({"model_path": old, "mode": "fast"}, "mode"),
        ({"model_path": old, "flush_cache": "yes"}, "flush_cache"),
        ({"model_path": old, "weight_version": 2}, "weight_version"),
    ]
    for body, why in wrong:
        status, answer = ask(engine, "/update_weights_from_disk", body)
        assert status == 400 and why in answer["message"], answer
    assert ask(engine, "/model_info")[1] == {"model_path": old, "weight_version": "v1"}
    again = engine.generate([PROMPT], GREEDY)[0]
    assert again.token_ids == before and again.cached_tokens > 0


@pytest.mark.parametrize("ranks", [1])
def test_an_update_that_is_to_flush_is_refused_before_it_changes_what_requests_run_on(
    start_engine: StartEngine, tmp_path: Path, ranks: int
) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    options: dict[str, Any] = {"load_format": "auto", "tensor_parallel_size": ranks}
    engine = start(start_engine, model=old, weight_version="v1", **options)
    before = answer_of(engine)
    expected = answer_of(start_engine(model=new, load_format="auto"))
    running = Running(engine, {**ENDLESS, "max_new_tokens": 300}).begun()
    body = {"model_path": new, "weight_version": "v2", "flush_cache": True}
    status, answer = ask(engine, "/update_weights_from_disk", body)
    assert status == 409 and "the weights are as they were" in answer["message"]
    assert ask(engine, "/model_info")[1] == {"model_path": old, "weight_version": "v1"}
    assert answer_of(engine) == before
    ask(engine, "/start_weight_update", {})
    assert ask(engine, "/update_weights_from_disk", body)[0] == 200
    status, answer = ask(engine, "/finish_weight_update", {})
    assert status == 409 and running.end() == "length" and running.versions == ["v1"]
    deadline = time.monotonic() + 20
    while status == 409:  # until the step behind the last one has settled; what was collected is still there
        assert time.monotonic() < deadline
        status, answer = ask(engine, "/finish_weight_update", {})
    assert (status, answer["weight_version"]) == (200, "v2")
    assert answer_of(engine) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_that_are_sent_answer_as_an_engine_that_started_with_them(
    start_engine: StartEngine, tmp_path: Path, ranks: int
) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    options: dict[str, Any] = {"load_format": "auto", "tensor_parallel_size": ranks}
    expected = answer_of(start_engine(model=new, **options))
    engine = start(start_engine, model=old, weight_version="v1", **options)
    before = answer_of(engine)
    first, second = halves(new)
    body = {"serialized_named_tensors": packed(first), "weight_version": "half"}
    assert ask(engine, "/update_weights_from_tensor", body)[0] == 200
    half = engine.generate([PROMPT], GREEDY)[0]
    assert half.cached_tokens == 0 and half.token_ids not in (before, expected)
    body = {"serialized_named_tensors": packed(second), "weight_version": "v2"}
    assert ask(engine, "/update_weights_from_tensor", body)[0] == 200
    after = engine.generate([PROMPT], GREEDY)[0]
    assert (after.token_ids, after.cached_tokens) == (expected, 0)  # what was sent before is still there
    assert ask(engine, "/model_info")[1] == {"model_path": old, "weight_version": "v2"}
    assert ask(engine, "/update_weights_from_disk", {"model_path": old})[0] == 200
    assert answer_of(engine) == before  # a checkpoint is served whole


def test_an_update_in_parts_serves_and_is_named_when_it_is_finished(start_engine: StartEngine, tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    expected = answer_of(start_engine(model=new, load_format="auto"))
    engine = start(start_engine, model=old, load_format="auto", weight_version="v1")
    before = answer_of(engine)
    status, refused = ask(engine, "/finish_weight_update", {"weight_version": "v2"})
    assert status == 409 and "/start_weight_update" in refused["message"]
    assert ask(engine, "/start_weight_update", {"is_checkpoint_format": True})[0] == 200
    for part in halves(new):
        body = {"serialized_named_tensors": packed(part), "weight_version": "v2"}
        assert ask(engine, "/update_weights_from_tensor", body)[0] == 200
        assert ask(engine, "/get_weight_version")[1] == {"weight_version": "v1"}
        assert answer_of(engine) == before
    status, finished = ask(engine, "/finish_weight_update", {})
    assert (status, finished["weight_version"]) == (200, "v2")
    after = engine.generate([PROMPT], GREEDY)[0]
    assert (after.token_ids, after.cached_tokens) == (expected, 0)
    # Finish's own name is the last word; without parts it only names.
    assert ask(engine, "/start_weight_update", {})[0] == 200
    assert ask(engine, "/finish_weight_update", {"weight_version": "v3"})[1]["weight_version"] == "v3"
    assert answer_of(engine) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_that_do_not_belong_change_nothing(start_engine: StartEngine, tmp_path: Path, ranks: int) -> None:
    old = checkpoint(tmp_path / "old", 1)
    engine = start(start_engine, model=old, load_format="auto", weight_version="v1", tensor_parallel_size=ranks)
    before = answer_of(engine)
    tensors, norm = load_file(f"{old}/model.safetensors"), "model.norm.weight"
    good = {"model.embed_tokens.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])}
    wrong: list[tuple[Any, str]] = [
        (packed(good, {"model.layers.0.nowhere.weight": torch.zeros(4)}), "model.layers.0.nowhere.weight"),
        (packed(good, {norm: torch.ones(3)}), norm),
        (packed(good, {norm: tensors[norm].int()}), norm),
        ([*packed(good), "cGlja2xl"], "serialized_named_tensors[1]"),
        ([*packed(good), "*"], "serialized_named_tensors[1]"),
        ([], "serialized_named_tensors"),
        (None, "serialized_named_tensors"),
    ]
    for sent, why in wrong:
        body = {"serialized_named_tensors": sent, "weight_version": "v2"}
        status, answer = ask(engine, "/update_weights_from_tensor", body)
        assert status == 400 and why in answer["message"], answer
    for path in ("/update_weights_from_tensor", "/start_weight_update", "/finish_weight_update"):
        status, answer = ask(engine, path, {"mode": "fast"})
        assert status == 400 and "mode" in answer["message"]
    assert ask(engine, "/start_weight_update", {"is_checkpoint_format": False})[0] == 400
    assert ask(engine, "/start_weight_update", {})[0] == 200
    body = {"serialized_named_tensors": packed({norm: torch.ones(3)}), "weight_version": "v2"}
    assert ask(engine, "/update_weights_from_tensor", body)[0] == 200
    status, answer = ask(engine, "/finish_weight_update", {"weight_version": "v3"})
    assert status == 400 and norm in answer["message"]
    assert ask(engine, "/finish_weight_update", {})[0] == 409  # a failed update is over
    assert ask(engine, "/model_info")[1] == {"model_path": old, "weight_version": "v1"}
    again = engine.generate([PROMPT], GREEDY)[0]
    assert again.token_ids == before and again.cached_tokens > 0


def test_a_stopped_engine_no_longer_listens(start_engine: StartEngine) -> None:
    engine = start(start_engine)
    port = engine.ports.control_port
    engine.shutdown()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
