# SPDX-License-Identifier: MIT
"""The main program of every ts_pytest target: runs pytest on the files it is given.

It stands in the runfiles tree, where paths are relative to the repository's root. It gives the tests a home and a
short temporary folder (Unix sockets allow 107 characters), reports to Bazel in its XML form and honours --test_filter.
"""

import os
import pathlib
import sys


def main(arguments: list[str]) -> int:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]

    scratch = os.environ.get("TEST_TMPDIR", "/tmp")
    for variable in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        os.environ.setdefault(variable, os.path.join(scratch, variable.lower()))
        pathlib.Path(os.environ[variable]).mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = "/tmp"
    # Bazel runs as many tests at a time as there are cores; a target that wants more threads says so in its env.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if model := os.environ.get("TOKENSPEED_EMBEDDED_MODEL"):
        os.environ["TOKENSPEED_EMBEDDED_MODEL"] = os.path.abspath(model)

    import pytest

    options = ["-c", "pyproject.toml", "--rootdir", os.getcwd(), "-q", "-p", "no:cacheprovider", "--durations=5"]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        options.append(f"--junitxml={report}")
    if chosen := os.environ.get("TESTBRIDGE_TEST_ONLY"):
        options += ["-k", chosen]
    return int(pytest.main([*options, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
