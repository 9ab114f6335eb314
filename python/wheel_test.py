# SPDX-License-Identifier: MIT
"""The wheel installs into an empty environment and gives the commands; its native parts load from there."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest


def wheel_file() -> pathlib.Path:
    found = list(pathlib.Path(os.environ["TOKENSPEED_WHEEL"]).glob("*.whl"))
    assert len(found) == 1, found
    return found[0]


def packages_path() -> str:
    """The locked packages of this test, without the repository's own code."""
    return os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A virtual environment with the wheel in it and nothing else."""
    venv = tmp_path_factory.mktemp("wheel") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "--disable-pip-version-check"]
    install = [*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel_file())]
    subprocess.run(install, env={**os.environ, "PYTHONPATH": packages_path()}, check=True)
    return venv


def run(environment: pathlib.Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": packages_path()}
    command = [str(environment / "bin" / program), *arguments]
    return subprocess.run(command, env=env, cwd=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("program", ["ts", "tokenspeed"])
def test_the_engine_command_says_its_version(environment: pathlib.Path, program: str) -> None:
    done = run(environment, program, "--version")
    assert done.returncode == 0, done.stderr
    assert wheel_file().name.split("-")[1] in done.stdout


def test_the_gateway_command_says_its_flags(environment: pathlib.Path) -> None:
    done = run(environment, "smg", "launch", "--help")
    assert done.returncode == 0, done.stderr
    assert "--worker-urls" in done.stdout


def test_native_parts_load_from_the_environment(environment: pathlib.Path) -> None:
    code = "import tokenspeed_cc, tokenspeed_kernel._cpu as cpu; print(tokenspeed_cc.__file__); print(cpu.__file__)"
    done = run(environment, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.split():
        assert pathlib.Path(line).is_relative_to(environment), line


def test_the_wheel_holds_stubs_fatbins_and_protocols_and_no_test() -> None:
    names = zipfile.ZipFile(wheel_file()).namelist()
    assert "tokenspeed_cc.pyi" in names
    assert any(name.startswith("tokenspeed_kernel/") and name.endswith(".fatbin") for name in names)
    assert "tokenspeed_protos/tokenspeed_scheduler_pb2_grpc.py" in names
    assert not [name for name in names if name.endswith("_test.py") or "/testdata/" in name]


def test_what_is_optional_is_an_extra() -> None:
    archive = zipfile.ZipFile(wheel_file())
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    assert "Provides-Extra: bench" in lines and 'Requires-Dist: matplotlib; extra == "bench"' in lines
