# SPDX-License-Identifier: MIT
"""An engine that sleeps gives its memory back, and answers as before once it is awake, on one rank and on two."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tokenspeed.engine.errors import OperationError
from tokenspeed.engine.occupation import HostOccupation, RankMemory, trim_freed_memory
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.testing import (
    CONFIG,
    ENDLESS,
    GREEDY,
    PROMPT,
    Running,
    answer_of,
    ask,
    checkpoint,
    halves,
    packed,
    start,
)

StartEngine = Callable[..., Engine]
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


def sleeper(start_engine: StartEngine, model: str, **options: Any) -> Engine:
    return start(start_engine, model=model, load_format="auto", enable_memory_saver=True, **options)


def resident_bytes() -> int:
    """Of this process, as the kernel counts it, without freed memory, of which the C library keeps as it comes."""
    trim_freed_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def waits(request: Running) -> None:
    time.sleep(0.2)
    assert not request.num_tokens and not request.finish


SOME = {**ENDLESS, "max_new_tokens": 200}


@pytest.mark.parametrize(("depth", "ranks"), [(0, 1), (1, 2)])
def test_what_comes_while_it_sleeps_waits_and_is_answered_as_before(
    start_engine: StartEngine, tmp_path: Path, depth: int, ranks: int
) -> None:
    model = checkpoint(tmp_path / "model", 1)
    engine = sleeper(start_engine, model, overlap_depth=depth, tensor_parallel_size=ranks, weight_version="v1")
    before = answer_of(engine)
    running = Running(engine, SOME).begun()
    assert ask(engine, RELEASE, {}) == (200, {"success": True, "message": "done"})
    assert running.end() == "length" and running.num_tokens == 200, "who ran came to an end first"
    assert ask(engine, "/is_sleeping") == (200, {"is_sleeping": True})
    assert ask(engine, RELEASE, {})[0] == 200, "once more changes nothing"
    waiting = Running(engine, GREEDY)
    waits(waiting)
    status, answer = ask(engine, "/continue_generation", {})
    assert status == 409 and "kv_cache and weights" in answer["message"]
    assert ask(engine, RESUME, {"tags": ["weights"]})[0] == 200
    assert ask(engine, "/is_sleeping")[1] == {"is_sleeping": True}
    waits(waiting)
    assert ask(engine, RESUME, {"tags": ["kv_cache"]})[0] == 200
    assert waiting.end() == "length" and waiting.versions == ["v1"]
    again = engine.generate([[*PROMPT, 9], PROMPT], GREEDY)
    assert again[1].token_ids == before and again[1].weight_version == "v1"
    assert ask(engine, "/is_sleeping")[1] == {"is_sleeping": False}
    engine.sleep(level=2)
    engine.wake_up()
    cold = engine.generate([PROMPT], GREEDY)[0]
    assert (cold.token_ids, cold.cached_tokens) == (before, 0), "no block outlives the sleep"
    assert engine.generate([PROMPT], GREEDY)[0].cached_tokens > 0
    assert ask(engine, "/v1/loads")[1]["loads"][0]["num_reqs"] == 0


def test_weights_alone_sleep_under_requests_that_are_kept_and_prefixes_stay_good(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = sleeper(start_engine, checkpoint(tmp_path / "model", 1))
    before = answer_of(engine)
    expected = engine.generate([PROMPT], {**GREEDY, "max_new_tokens": 900})[0].token_ids
    running = Running(engine).begun()
    assert ask(engine, RELEASE, {"tags": ["weights"], "mode": "keep"})[0] == 200
    seen = running.num_tokens
    time.sleep(0.2)
    assert seen == running.num_tokens < 900
    status, answer = ask(engine, RELEASE, {"tags": ["kv_cache"]})
    assert status == 409 and "hold blocks" in answer["message"]
    assert ask(engine, RESUME, {})[0] == 200
    assert running.end() == "length" and running.num_tokens == len(expected)
    again = engine.generate([PROMPT], GREEDY)[0]
    assert again.token_ids == before and again.cached_tokens > 0


def test_a_pause_of_the_operator_outlives_a_sleep(start_engine: StartEngine, tmp_path: Path) -> None:
    engine = sleeper(start_engine, checkpoint(tmp_path / "model", 1))
    before = answer_of(engine)
    assert ask(engine, "/pause_generation", {"mode": "abort"})[0] == 200
    assert ask(engine, RELEASE, {"tags": ["kv_cache"]})[0] == ask(engine, RESUME, {})[0] == 200
    waiting = Running(engine, GREEDY)
    waits(waiting)
    assert ask(engine, "/continue_generation", {})[0] == 200
    assert waiting.end() == "length" and answer_of(engine) == before


@pytest.mark.parametrize("ranks", [2])
def test_weights_that_sleep_wake_up_as_what_they_are_updated_to(
    start_engine: StartEngine, tmp_path: Path, ranks: int
) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    expected = answer_of(start_engine(model=new, load_format="auto"))
    engine = sleeper(start_engine, old, weight_version="v1", tensor_parallel_size=ranks)
    before = answer_of(engine)
    engine.release_memory_occupation()
    bad = {"serialized_named_tensors": packed({"model.norm.weight": torch.ones(3)}), "weight_version": "v2"}
    assert ask(engine, "/update_weights_from_tensor", bad)[0] == 400
    assert sorted(engine.operations.asleep) == ["kv_cache", "weights"]
    for part in halves(new):
        body = {"serialized_named_tensors": packed(part), "weight_version": "v2"}
        assert ask(engine, "/update_weights_from_tensor", body)[0] == 200
    assert list(engine.operations.asleep) == ["kv_cache"]
    waiting = Running(engine, GREEDY)
    waits(waiting)
    engine.resume_memory_occupation(["kv_cache"])
    assert waiting.end() == "length" and waiting.versions == ["v2"]
    assert answer_of(engine) == expected
    engine.sleep()
    engine.wake_up()
    assert answer_of(engine) == expected, "what was sent is there again"
    engine.release_memory_occupation(["weights"])
    waiting = Running(engine, GREEDY)
    engine.update_weights_from_disk(old, weight_version="v3")
    assert waiting.end() == "length" and waiting.versions == ["v3"] and not engine.is_sleeping
    engine.update_weights_from_tensor(load_file(f"{new}/model.safetensors"), weight_version="v4")
    assert answer_of(engine) == expected != before and engine.weight_version == "v4"


def test_a_checkpoint_that_was_overwritten_meanwhile_is_not_taken_for_the_old_one(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    expected = answer_of(start_engine(model=new, load_format="auto"))
    engine = sleeper(start_engine, old, weight_version="v1")
    engine.release_memory_occupation()
    os.replace(f"{new}/model.safetensors", f"{old}/model.safetensors")
    status, answer = ask(engine, RESUME, {})
    assert status == 409 and "have changed since they were read" in answer["message"]
    assert ask(engine, "/update_weights_from_disk", {"model_path": old, "weight_version": "v2"})[0] == 200
    assert ask(engine, RESUME, {})[0] == 200
    assert answer_of(engine) == expected and engine.weight_version == "v2"


def test_what_cannot_sleep_is_refused_and_serves_on(start_engine: StartEngine, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", 1)
    plain = start(start_engine, model=model, load_format="auto")
    for path in (RELEASE, RESUME, "/sleep", "/wake_up"):
        status, answer = ask(plain, path, {})
        assert status == 501 and "--enable-memory-saver" in answer["message"]
    engine = sleeper(start_engine, model)
    wrong: list[tuple[str, dict[str, Any], str]] = [
        (RELEASE, {"tags": ["weights", "graphs"]}, "graphs"),
        (RELEASE, {"tags": 3}, "tags"),
        (RELEASE, {"tags": ["kv_cache"], "mode": "keep"}, "keep"),
        (RELEASE, {"mode": "nap"}, "nap"),
        (RELEASE, {"level": 1}, "level"),
        (RESUME, {"tags": ["x"]}, "'x'"),
        ("/sleep?level=3", {}, "level"),
        ("/wake_up?tags=weights&tags=x", {}, "'x'"),
    ]
    for path, body, why in wrong:
        status, answer = ask(engine, path, body)
        assert status == 400 and why in answer["message"], answer
    assert engine._core is not None
    with engine._core.operations.updates.exclusive():
        status, answer = ask(engine, RELEASE, {})
        assert status == 409 and "under way" in answer["message"]
    assert len(answer_of(engine)) == 8 and not engine.is_sleeping
    with pytest.raises(ValueError, match="level"):
        engine.sleep(level=0)
    with pytest.raises(OperationError, match="nothing was released: requests still run"):
        running = Running(engine, SOME).begun()
        engine.operations.release_memory(["weights"], "wait", False, 0.0)
    assert running.end() == "length" and not engine.is_sleeping and len(answer_of(engine)) == 8


def test_callers_of_vllms_names_put_fields_into_the_query(start_engine: StartEngine, tmp_path: Path) -> None:
    engine = sleeper(start_engine, checkpoint(tmp_path / "model", 1))
    running = Running(engine).begun()
    assert ask(engine, "/sleep?level=2&mode=abort", {})[0] == 200
    assert running.end() == "abort"
    assert ask(engine, "/wake_up?tags=weights", {})[0] == 200
    assert list(engine.operations.asleep) == ["kv_cache"]
    assert ask(engine, "/wake_up", {})[0] == 200 and not engine.is_sleeping


def own_memory(engine: Engine) -> HostOccupation:
    assert engine._core is not None
    memory: RankMemory = engine._core.operations._memory
    assert isinstance(memory._own, HostOccupation)
    return memory._own


def test_the_memory_really_goes_back(start_engine: StartEngine, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | sizes))
    engine = start_engine(model=str(tmp_path), enable_memory_saver=True, max_total_tokens=None, kv_cache_gib=0.25)
    weights, pool = 4 * 4 * (2 * 1024 * 1024 + 2 * 512 * 1024 + 3 * 1024 * 4096), 2**28
    caches = [tensor for layer in own_memory(engine)._caches for tensor in layer]
    for tensor in caches:
        tensor.fill_(1.0)  # pages are real once they were written to
    before, awake = answer_of(engine), resident_bytes()
    engine.release_memory_occupation(["weights"])
    weightless = resident_bytes()
    assert awake - weightless > 0.9 * weights
    engine.release_memory_occupation(["kv_cache"])
    assert weightless - resident_bytes() > 0.9 * pool
    engine.resume_memory_occupation()
    assert not any(tensor.any() for tensor in caches)
    assert abs(resident_bytes() - awake + pool) < 0.3 * weights + 0.1 * pool
    assert answer_of(engine) == before


def test_where_there_is_no_room_yet_it_sleeps_on(
    start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sleeper(start_engine, checkpoint(tmp_path / "model", 1))
    before = answer_of(engine)
    engine.release_memory_occupation(["kv_cache"])

    def no_room(_tag: str) -> None:
        raise RuntimeError("cuMemCreate failed: out of memory (2)")

    with monkeypatch.context() as trainer_has_it:
        trainer_has_it.setattr(own_memory(engine), "resume", no_room)
        status, answer = ask(engine, RESUME, {})
    assert status == 503 and "kv_cache: there is no room for it yet" in answer["message"]
    waiting = Running(engine, GREEDY)
    waits(waiting)
    assert ask(engine, RESUME, {})[0] == 200
    assert waiting.end() == "length" and answer_of(engine) == before


def test_a_host_tier_of_kv_blocks_and_sleep_go_together(start_engine: StartEngine, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_total_tokens": 256, "kvstore_ratio": 4.0, "max_num_seqs": 4}
    engine = sleeper(start_engine, checkpoint(tmp_path / "model", 1), **options)
    prompts = [[5 + number, *PROMPT] for number in range(12)]

    def answers() -> list[list[int]]:
        return [output.token_ids for output in engine.generate(prompts, GREEDY)]

    before = answers()
    assert answers() == before
    engine.sleep()
    engine.wake_up()
    cold = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in cold] == before
    assert sum(output.cached_tokens for output in cold[:2]) == 0, "no block outlives the sleep, on the host neither"
    assert answers() == before
