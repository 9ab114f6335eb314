# SPDX-License-Identifier: MIT
"""A trainer in a process of its own sends weights through a process group that it shares with an engine's ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.processes import free_port, python_environment
from tokenspeed.engine.errors import OperationError
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.testing import PROMPT, Running, StartEngine, answer_of, ask, checkpoint, start

JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
UPDATE = "/update_weights_from_distributed"


class Trainer:
    def __init__(self, num_ranks: int, name: str = "weight_update_group") -> None:
        port = free_port()
        self.group: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        self.group |= {"world_size": 1 + num_ranks, "group_name": name, "backend": "gloo"}
        environment = python_environment()
        command = [sys.executable, "-m", "tokenspeed.engine.trainer_testing", str(port), str(1 + num_ranks), name]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def tells(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def is_told(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    running: list[Trainer] = []
    yield running
    for trainer in running:
        trainer.end()


def joined(engine: Engine, trainers: list[Trainer], num_ranks: int) -> Trainer:
    trainers.append(trainer := Trainer(num_ranks))
    assert ask(engine, JOIN, trainer.group) == (200, {"success": True, "message": "done"})
    assert trainer.tells() == "joined"
    return trainer


def facts(path: Path | str) -> dict[str, Any]:
    tensors = load_file(path)
    names = sorted(tensors)
    return {
        "names": names,
        "dtypes": [str(tensors[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [list(tensors[name].shape) for name in names],
    }


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, path)
    return str(path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_trainer_broadcasts_serves_under_its_name_and_a_bad_part_of_it_does_not(
    start_engine: StartEngine, tmp_path: Path, trainers: list[Trainer], ranks: int
) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    expected = answer_of(start_engine(model=new, load_format="auto"))
    options: dict[str, Any] = {"load_format": "auto", "tensor_parallel_size": ranks, "enable_memory_saver": True}
    engine = start(start_engine, model=old, weight_version="v1", **options)
    before = answer_of(engine)
    trainer = joined(engine, trainers, ranks)
    status, answer = ask(engine, JOIN, trainer.group)
    assert status == 400 and "is joined already" in answer["message"]

    whole = load_file(f"{new}/model.safetensors")
    good = {"model.embed_tokens.weight": torch.zeros_like(whole["model.embed_tokens.weight"])}
    wrong = [
        ({**good, "model.layers.0.nowhere.weight": torch.zeros(4)}, "model.layers.0.nowhere.weight"),
        ({**good, "model.norm.weight": torch.ones(3)}, "model.norm.weight"),
        ({**good, "model.norm.weight": torch.ones(64, dtype=torch.int64)}, "model.norm.weight"),
    ]
    for tensors, why in wrong:  # each is received whole, so that the group stays good
        path = saved(tmp_path / "wrong.safetensors", tensors)
        trainer.is_told(f"send {path}")
        status, answer = ask(engine, UPDATE, {**facts(path), "weight_version": "v2"})
        assert status == 400 and why in answer["message"], answer
        assert trainer.tells() == "sent"
    assert answer_of(engine) == before and engine.weight_version == "v1"

    running = Running(engine, {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}).begun()
    names = sorted(whole)
    halves = [{name: whole[name].bfloat16() if "norm" in name else whole[name] for name in names[::2]}]
    halves.append({name: whole[name] for name in names[1::2]})
    for number, half in enumerate(halves):
        path = saved(tmp_path / f"{number}.safetensors", half)
        trainer.is_told(f"send {path}")
        assert ask(engine, UPDATE, {**facts(path), "weight_version": f"v{number + 2}"})[0] == 200
        assert trainer.tells() == "sent"
    after = engine.generate([PROMPT], {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True})[0]
    assert (after.token_ids, after.cached_tokens, after.weight_version) == (expected, 0, "v3")
    assert running.end() == "length"
    engine.sleep(level=2)
    engine.wake_up()
    assert answer_of(engine) == expected, "what was sent is not lost in a sleep"
    assert ask(engine, LEAVE, {})[0] == 200
    status, answer = ask(engine, UPDATE, facts(path))
    assert status == 400 and "there is no group 'weight_update_group'" in answer["message"]


@pytest.mark.parametrize("ranks", [2])
def test_a_trainer_that_dies_amid_its_tensors_changes_nothing_and_another_may_come(
    start_engine: StartEngine, tmp_path: Path, trainers: list[Trainer], ranks: int
) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    engine = start(start_engine, model=old, load_format="auto", weight_version="v1", tensor_parallel_size=ranks)
    before = answer_of(engine)
    path = f"{new}/model.safetensors"
    trainer = joined(engine, trainers, ranks)
    trainer.is_told(f"send {path} 5")
    status, answer = ask(engine, UPDATE, {**facts(path), "weight_version": "v2"})
    assert status == 503 and "the weights are as they were" in answer["message"]
    assert ask(engine, LEAVE, {})[0] == 400, "it is closed"
    assert answer_of(engine) == before and engine.weight_version == "v1"
    again = joined(engine, trainers, ranks)
    again.is_told(f"send {path}")
    engine.start_weight_update()
    told = facts(path)
    engine.update_weights_from_distributed(told["names"], told["dtypes"], told["shapes"], weight_version="v2")
    assert again.tells() == "sent" and answer_of(engine) == before
    engine.finish_weight_update()
    assert answer_of(engine) != before and engine.weight_version == "v2"
    engine.destroy_weights_update_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bucket_of_all_tensors_is_served_as_they_are(
    start_engine: StartEngine, tmp_path: Path, trainers: list[Trainer], ranks: int
) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    options: dict[str, Any] = {"load_format": "auto", "tensor_parallel_size": ranks}
    expected = answer_of(start_engine(model=new, **options))
    engine = start(start_engine, model=old, **options)
    trainer = joined(engine, trainers, ranks)
    trainer.is_told(f"flat {new}/model.safetensors")
    told = facts(f"{new}/model.safetensors") | {"load_format": "flattened_bucket", "weight_version": "v2"}
    assert ask(engine, UPDATE, told)[0] == 200
    assert trainer.tells() == "sent"
    assert answer_of(engine) == expected and engine.weight_version == "v2"


def test_what_is_wrong_with_a_group_is_said_by_field_and_none_is_joined(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model", 1)
    engine = start(start_engine, model=model, load_format="auto", distributed_timeout_seconds=3)
    before = answer_of(engine)
    good = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"master_address": ""}, "master_address"),
        ({"master_port": 70000}, "master_port"),
        ({"rank_offset": 0}, "rank_offset"),
        ({"world_size": "2"}, "world_size"),
        ({"rank_offset": 2}, "world_size: 2 has no place for the engine's 2 to 2"),
        ({"backend": "nccl"}, "use gloo"),
        ({"backend": "mpi"}, "mpi"),
        ({"group_name": 3}, "group_name"),
        ({"timeout": 3}, "timeout"),
    ]
    for change, why in wrong:
        status, answer = ask(engine, JOIN, good | change)
        assert status == 400 and why in answer["message"], answer
    status, answer = ask(engine, JOIN, good)  # nobody is there
    assert status == 503 and "127.0.0.1:9 was not joined" in answer["message"]
    told = facts(f"{model}/model.safetensors")
    several: list[tuple[dict[str, Any], str]] = [
        ({}, "there is no group 'weight_update_group' (joined: none)"),
        ({"dtypes": told["dtypes"][1:]}, "dtypes"),
        ({"dtypes": ["complex", *told["dtypes"][1:]]}, "dtypes[0]"),
        ({"shapes": [[-1], *told["shapes"][1:]]}, "shapes[0]"),
        ({"names": [told["names"][1], *told["names"][1:]]}, "comes twice"),
        ({"names": [], "dtypes": [], "shapes": []}, "names"),
        ({"names": None}, "names"),
        ({"load_format": "direct"}, "load_format"),
    ]
    for change, why in several:
        status, answer = ask(engine, UPDATE, told | change)
        assert status == 400 and why in answer["message"], answer
    with pytest.raises(OperationError, match="no group 'x'"):
        engine.destroy_weights_update_group("x")
    assert answer_of(engine) == before


def test_an_engine_answers_while_it_waits_for_a_trainer(
    start_engine: StartEngine, tmp_path: Path, trainers: list[Trainer]
) -> None:
    model = checkpoint(tmp_path / "model", 1)
    engine = start(start_engine, model=model, load_format="auto")
    trainer = joined(engine, trainers, 1)
    told = facts(f"{model}/model.safetensors")
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(ask(engine, UPDATE, told)[0]))
    thread.start()
    assert len(answer_of(engine)) == 8
    trainer.is_told(f"send {model}/model.safetensors")
    thread.join(60)
    assert statuses == [200] and trainer.tells() == "sent"
