# SPDX-License-Identifier: MIT
"""Profiles through the control port of a running engine, a trace a rank, and what is refused before it records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import python_environment
from tokenspeed.engine.conftest import StartEngine
from tokenspeed.engine.profiler import FOLDER_ENV, ProfileRefused, profile_options
from tokenspeed.engine.testing import GREEDY, PROMPT, answer_of, ask, start


def operators(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "cpu_op"}


@pytest.mark.parametrize(("depth", "ranks"), [(0, 1), (1, 2)])
def test_every_rank_leaves_a_trace_of_its_steps(
    start_engine: StartEngine, tmp_path: Path, depth: int, ranks: int
) -> None:
    engine = start(start_engine, overlap_depth=depth, tensor_parallel_size=ranks)
    before = answer_of(engine)
    folder = tmp_path / "traces"
    assert ask(engine, "/start_profile", {"output_dir": str(folder)})[0] == 200
    assert ask(engine, "/start_profile", {"output_dir": str(folder)})[0] == 409
    assert answer_of(engine) == before
    status, answer = ask(engine, "/stop_profile", {})
    assert status == 200
    assert answer_of(engine) == before  # and every rank has turned to the next call, so all have written
    paths = sorted(folder.iterdir(), key=lambda path: path.name.split("-")[2])  # the ranks' clocks differ
    assert [path.name.split("-")[2] for path in paths] == [f"tp{rank}" for rank in range(ranks)]
    assert str(paths[0]) in answer["message"]
    assert all(any(name.startswith("aten::") for name in operators(path)) for path in paths)
    assert ask(engine, "/stop_profile", {})[0] == 409


def test_a_limited_profile_ends_by_itself_and_get_takes_the_folder_of_the_environment(
    start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(start_engine)
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "env"))
    assert ask(engine, "/start_profile")[0] == 200 and ask(engine, "/stop_profile")[0] == 200
    assert ask(engine, "/start_profile", {"num_steps": 2, "output_dir": str(tmp_path / "two")})[0] == 200
    engine.generate([PROMPT], GREEDY)
    deadline_s = time.monotonic() + 20
    while ask(engine, "/stop_profile")[0] != 409:
        assert time.monotonic() < deadline_s
    (path,) = (tmp_path / "two").iterdir()
    assert operators(path) and len(list((tmp_path / "env").iterdir())) == 1


def test_an_engine_that_ends_amid_a_profile_writes_it_and_ends_well(tiny_model: str, tmp_path: Path) -> None:
    """In a process of its own: what torch leaves behind of a profile crashed it at exit."""
    script = f"""
from tokenspeed.engine.offline import Engine
options = {{"device": "cpu", "num_threads": 1, "max_total_tokens": 256, "max_model_len": 64, "load_format": "dummy"}}
with Engine({tiny_model!r}, skip_tokenizer_init=True, **options) as engine:
    engine.operations.start_profile({{"output_dir": {str(tmp_path)!r}}})
    engine.generate([[1, 2, 3]], {{"max_new_tokens": 2}})
"""
    env = python_environment()
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    assert operators(path)


def test_a_profile_that_cannot_be_written_is_refused(start_engine: StartEngine, tmp_path: Path) -> None:
    engine = start(start_engine)
    (tmp_path / "file").write_text("")
    for body in ({"output_dir": str(tmp_path / "file")}, {}, {"output_dir": str(tmp_path), "start_step": 0}):
        status, answer = ask(engine, "/start_profile", body)
        assert status == 400 and ("start_step" if "start_step" in body else "output_dir") in answer["message"]
    assert ask(engine, "/stop_profile")[0] == 409


def test_a_profile_may_begin_at_a_later_step_and_have_a_name_of_its_own(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start(start_engine)
    folder = tmp_path / "first"
    asked = {"output_dir": str(tmp_path), "profile_prefix": "decode-", "start_step": 1_000_000}
    assert "from step 1000000" in ask(engine, "/start_profile", asked)[1]["message"]
    assert ask(engine, "/start_profile", asked)[0] == 409
    assert "nothing was recorded" in ask(engine, "/stop_profile")[1]["message"] and not list(tmp_path.iterdir())
    engine.generate([PROMPT], GREEDY)
    message = ask(engine, "/start_profile", {"output_dir": str(folder)})[1]["message"]
    said = re.match(r"recording from step (\d+) on", message)
    assert said and ask(engine, "/stop_profile")[0] == 200
    so_far = int(said.group(1))
    assert ask(engine, "/start_profile", {**asked, "start_step": so_far + 3, "num_steps": 2})[0] == 200
    (path,) = tmp_path.glob("decode-*")
    assert not path.read_text()
    engine.generate([PROMPT], GREEDY)
    deadline_s = time.monotonic() + 20
    while not path.read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert operators(path) and ask(engine, "/stop_profile")[0] == 409


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"output_dir": 3}, "output_dir"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": "4"}, "num_steps"),
        ({"activities": ["TPU"]}, "activities"),
        ({"activities": "CPU"}, "activities"),
        ({"activities": ["GPU"]}, "activities: GPU"),
        ({"with_stack": 1}, "with_stack"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"merge_profiles": True}, "merge_profiles"),
        ({"start_step": -1}, "start_step"),
        ({"profile_prefix": "a/b"}, "profile_prefix"),
        ({"speed": 1}, "speed"),
    ],
)
def test_a_field_that_is_wrong_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ProfileRefused, match=f"^{named}: "):
        profile_options({"output_dir": "/tmp/x", **fields}, has_gpu=False)


def test_defaults_record_what_the_machine_has() -> None:
    asked: dict[str, Any] = {"output_dir": "x", "start_step": None, "activities": [], "record_shapes": True}
    assert profile_options(asked, has_gpu=True).activities == ("CPU", "GPU")
    assert profile_options(asked, has_gpu=False).activities == ("CPU",)
    assert profile_options({"output_dir": "x", "activities": ["CPU", "MEM"]}, False).activities == ("CPU", "MEM")
