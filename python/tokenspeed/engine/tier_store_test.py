# SPDX-License-Identifier: MIT
"""Engines that keep their blocks in a folder: the next one finds them, to the bit, and what fails costs hits only."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenspeed.config.flags import FlagError
from tokenspeed.engine.testing import StartEngine, checkpoint
from tokenspeed.engine.tier_test import LARGE, SESSIONS, SMALL, WHOLE_BLOCKS, cached, core_of, metric, settled, turn
from tokenspeed.kvstore import Names, Store

FEW = SESSIONS[:4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("models") / "one", 1)


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    extra = {"path": str(folder), "max_gb": 0.1, "wait_s": 30} | changes
    return {
        **SMALL,
        "load_format": "auto",
        "kvstore_storage_backend": "file",
        "kvstore_storage_backend_extra_config": json.dumps(extra),
        "metrics_port": 0,
    }


def blocks(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def filled(start_engine: StartEngine, model: str, folder: Path, **more: Any) -> list[Any]:
    """The answers of an engine that has put its blocks into the folder and ended."""
    engine = start_engine(model=model, **options(folder), **more)
    answers = turn(engine, FEW)
    settled(engine)
    engine.shutdown()
    return answers


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_next_engine_finds_what_this_one_computed(
    start_engine: StartEngine, model: str, tmp_path: Path, ranks: int
) -> None:
    more = {"tensor_parallel_size": ranks}
    expected = filled(start_engine, model, tmp_path, **more)
    if ranks == 1:
        assert turn(start_engine(model=model, load_format="auto", **LARGE), FEW) == expected
    assert len(blocks(tmp_path)) == ranks * len(FEW) * WHOLE_BLOCKS // 16, "of warming up there is nothing"
    engine = start_engine(model=model, **options(tmp_path), **more)
    assert turn(engine, FEW) == expected
    assert metric(engine, "prompt_tokens_by_source_total", "store_hit") == WHOLE_BLOCKS * len(FEW)
    assert metric(engine, "prompt_tokens_by_source_total", "computed") == (100 - WHOLE_BLOCKS) * len(FEW)
    assert metric(engine, "kv_moved_bytes_total", "from_store") > 0
    assert settled(engine).active_blocks == 0


def test_blocks_that_a_disk_has_spoilt_are_computed_again(
    start_engine: StartEngine, model: str, tmp_path: Path
) -> None:
    expected = filled(start_engine, model, tmp_path)
    for path in blocks(tmp_path)[::2]:
        content = bytearray(path.read_bytes())
        content[-100] ^= 255
        path.write_bytes(content)
    engine = start_engine(model=model, **options(tmp_path))
    assert turn(engine, FEW) == expected
    assert metric(engine, "prompt_tokens_by_source_total", "store_hit") < WHOLE_BLOCKS * len(FEW)
    assert settled(engine).active_blocks == 0


def test_other_weights_share_nothing_and_leave_nothing(start_engine: StartEngine, model: str, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    filled(start_engine, model, folder)
    before = blocks(folder)
    other = start_engine(model=checkpoint(tmp_path / "two", 2), **options(folder))
    assert cached(other, FEW[:1]) == [0]
    other.shutdown()
    engine = start_engine(model=model, **options(folder))
    core_of(engine).operations.updates.rename("after a step of training")
    assert cached(engine, FEW) == [0] * len(FEW)
    settled(engine)
    assert len(blocks(folder)) > len(before) + 6
    engine.shutdown()
    assert len(blocks(folder)) == len(before) + 6, "what came after the start went with the run"


def test_a_prompt_that_is_to_be_scored_is_never_found(start_engine: StartEngine, model: str, tmp_path: Path) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 2, "prompt_logprobs": 1}
    for _ in range(2):
        engine = start_engine(model=model, **options(tmp_path), seed=3)
        output = engine.generate([FEW[0]], params)[0]
        assert output.cached_tokens == 0 and len(output.prompt_logprobs or []) == len(FEW[0])
        settled(engine)
        engine.shutdown()


class Broken:
    """A store that waits or fails where it is asked."""

    def __init__(self, behind: Store, fails: bool) -> None:
        self._behind, self._fails = behind, fails
        self.go = threading.Event()

    def has(self, names: Names, index: int) -> bool:
        return self._behind.has(names, index)

    def get(self, names: Names, index: int, row: NDArray[np.uint8]) -> bool:
        if self._fails:
            raise OSError("the disk is on fire")
        assert self.go.wait(60)
        return self._behind.get(names, index, row)

    def put(self, names: Names, index: int, row: NDArray[np.uint8]) -> None:
        self._behind.put(names, index, row)


@pytest.mark.parametrize("fails", [True, False], ids=["it fails", "it is late"])
def test_a_store_that_is_of_no_use_costs_hits_and_nothing_else(
    start_engine: StartEngine, model: str, tmp_path: Path, fails: bool
) -> None:
    expected = filled(start_engine, model, tmp_path)
    engine = start_engine(model=model, **options(tmp_path, wait_s=0.1))
    carrier = core_of(engine).tier.carrier
    carrier.store = broken = Broken(carrier.store, fails)
    assert turn(engine, FEW) == expected
    assert metric(engine, "prompt_tokens_by_source_total", "store_hit") == 0
    broken.go.set()
    assert settled(engine).active_blocks == 0


def test_an_abort_while_the_store_is_asked_ends_once(start_engine: StartEngine, model: str, tmp_path: Path) -> None:
    filled(start_engine, model, tmp_path)
    engine = start_engine(model=model, **options(tmp_path))
    carrier = core_of(engine).tier.carrier
    carrier.store = broken = Broken(carrier.store, fails=False)
    ends: list[str] = []
    job = engine.job(FEW[0], {"max_new_tokens": 4})
    engine.frontend.submit(job.requests, lambda deltas: ends.extend(d.finish for d in deltas if d.finish))  # type: ignore[union-attr]
    while not core_of(engine).loop.tier.is_busy:
        time.sleep(0.001)
    assert core_of(engine).operations.abort(job.requests[0].rid) == 1
    broken.go.set()
    assert settled(engine).active_blocks == 0
    assert ends == ["abort"]


def wrong(extra: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {
        **SMALL,
        "kvstore_storage_backend": "file",
        "kvstore_storage_backend_extra_config": None if extra is None else json.dumps(extra),
        **more,
    }


def test_what_cannot_be_is_refused_by_the_flag(start_engine: StartEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    name = "^--kvstore-storage-backend-extra-config: "
    for given, why in (
        (wrong(None), name + 'the file backend needs a "path"'),
        (wrong({"path": str(tmp_path / "file")}), name + ".*file: File exists"),
        (wrong({"path": str(tmp_path), "max_gb": 1e-6}), name + "max_gb 1e-06: a block has .* GB alone"),
        (wrong({"path": str(tmp_path), "size": 3}), name + "'size' is not one of max_gb, path, wait_s"),
        (wrong({"path": str(tmp_path)}, kvstore_ratio=0.0), "^--kvstore-storage-backend: its blocks pass through host"),
        (wrong({}, kvstore_storage_backend="mooncake"), "^--kvstore-storage-backend: mooncake: its package needs"),
        (wrong({"path": "x"}, kvstore_storage_backend=None), name + "goes with --kvstore-storage-backend file"),
    ):
        with pytest.raises(FlagError, match=why):
            start_engine(**given)
