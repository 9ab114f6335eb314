# SPDX-License-Identifier: MIT
"""What was measured fastest is written down, and selection goes by it; a bad table changes nothing but says so."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel.bench import tune
from tokenspeed_kernel.explain import explain_text
from tokenspeed_kernel.registry import (
    Band,
    Signature,
    anywhere,
    current_platform,
    declare_op,
    forget_tuning,
    kernel,
    override,
    select,
)
from tokenspeed_kernel.registry.tuning import TUNING_ENV, call_key, read_table, write_table

CALL = Signature("cpu", torch.float32, (64,))
OP = declare_op("test.tuned", ("size",))
for _name, _band, _sizes in (
    ("fast", Band.PORTABLE, {64}),
    ("ranked", Band.NATIVE, {64, 80}),
    ("off", Band.NATIVE, {1}),
):
    kernel(OP.name, name=_name, needs=anywhere(), dtypes={torch.float32}, band=_band, traits={"size": _sizes})(
        lambda: None
    )


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(TUNING_ENV, str(tmp_path / "kernels.json"))
    forget_tuning()
    yield tmp_path / "kernels.json"
    monkeypatch.undo()
    forget_tuning()


def remember(path: Path, solution: str, machine: str | None = None) -> None:
    key = call_key(OP.name, CALL.device, CALL.dtype, {"size": 64})
    write_table(path, {machine or current_platform().describe(): {key: solution}})
    forget_tuning()


def test_measured_solution_goes_before_one_of_a_higher_band(path: Path) -> None:
    assert select(OP.name, CALL).name == "ranked"
    remember(path, "fast")
    assert select(OP.name, CALL).name == "fast"
    assert select(OP.name, CALL._replace(traits=(80,))).name == "ranked"


def test_override_goes_before_the_table(path: Path) -> None:
    remember(path, "fast")
    with override({OP.name: "ranked"}):
        assert select(OP.name, CALL).name == "ranked"


@pytest.mark.parametrize("solution", ["off", "gone"])
def test_entry_that_does_not_fit_is_passed_over(path: Path, solution: str) -> None:
    remember(path, solution)
    assert select(OP.name, CALL).name == "ranked"


def test_table_of_another_machine_says_nothing_here(path: Path) -> None:
    remember(path, "fast", machine="cpu of another world")
    assert select(OP.name, CALL).name == "ranked"


def test_explain_names_the_table(path: Path) -> None:
    remember(path, "fast")
    text = explain_text(OP.name, ["device=cpu", "dtype=float32", "size=64"])
    assert f"chosen   fast    measured fastest ({path})" in text
    assert "measured slower than fast" in text
    assert "chosen   ranked" in explain_text(OP.name, ["device=cpu", "dtype=float32"])


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"version": 2, "machines": {}}', '{"version": 1, "machines": {"a": {"b": 3}}}', "\x00"]
)
def test_corrupt_table_is_ignored_with_a_warning_that_names_it(
    path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(content)
    forget_tuning()
    with caplog.at_level(logging.WARNING):
        assert select(OP.name, CALL).name == "ranked"
        assert select(OP.name, CALL).name == "ranked"
    (record,) = caplog.records
    assert str(path) in record.message and "ts kernels tune" in record.message


def test_no_table_is_no_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_table(path) == {} and not caplog.records


def test_tuning_measures_calls_with_a_choice_and_keeps_what_others_wrote(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(path, {"elsewhere": {"x": "y"}})
    assert tune.main(["--device", "cpu", "--op", "gemm.logits", "--budget-s", "0.001"]) == 0
    table = json.loads(path.read_text())["machines"]
    assert table["elsewhere"] == {"x": "y"}
    assert current_platform().describe() in table
    assert str(path) in capsys.readouterr().out


@pytest.mark.skipif(current_platform().cuda_capability is not None, reason="this machine has a GPU")
def test_absent_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "ts kernels tune: error: --device cuda: this machine has none\n"


def test_unknown_operation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--op", "norm.rmx"]) == 2
    assert capsys.readouterr().err.startswith("ts kernels tune: error: unknown operation 'norm.rmx'")


def test_table_that_cannot_be_written_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("")
    monkeypatch.setenv(TUNING_ENV, str(path / "below" / "a_file.json"))
    assert tune.main(["--device", "cpu", "--op", "sampling.penalties"]) == 1
    assert "cannot write" in capsys.readouterr().err
