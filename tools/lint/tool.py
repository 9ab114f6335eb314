# SPDX-License-Identifier: MIT
"""Runs one Python lint tool on the tree: tool.py ruff|mypy ARGS...

As the Bazel target //tools/lint:tool it sees the locked wheels on its path and nothing else, so that everybody lints
with the same versions. mypy must run inside this process: it looks for packages on the path of its own interpreter.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def ruff_binary() -> str:
    """The ruff executable of the wheel on the path, wherever the wheel's scripts were put."""
    for entry in map(Path, sys.path):
        for folder in (entry / "bin", entry.parent / "bin", entry.parent.parent.parent / "bin"):
            if (folder / "ruff").is_file():
                return str(folder / "ruff")
    sys.exit("lint: no ruff executable beside the wheels on sys.path")


def main() -> None:
    tool, arguments = sys.argv[1], sys.argv[2:]
    # `bazel run` starts in the runfiles; the tree is where it was called.
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    if tool == "ruff":
        binary = ruff_binary()
        os.execv(binary, [binary, *arguments])
    elif tool == "mypy":
        sys.argv = ["mypy", *arguments]
        runpy.run_module("mypy", run_name="__main__")
    else:
        sys.exit(f"lint: no tool is named {tool}")


if __name__ == "__main__":
    main()
