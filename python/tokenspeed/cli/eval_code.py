# SPDX-License-Identifier: MIT
"""Runs a program that a model wrote, in a process of its own with limits on time, memory and network.

Called by `ts eval --task humaneval` alone, and only with `--allow-code-execution`: the limits of `eval_child` keep
accidents small (an endless loop, a huge list, a download); they are not a security boundary. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("eval_child.py")
PASSED = "passed"


@dataclass(frozen=True)
class CodeLimits:
    """For each program. `timeout_s`: wall time, and processor time rounded up; `memory_bytes`: of address space."""

    timeout_s: float
    memory_bytes: int


async def run_program(source: str, limits: CodeLimits) -> str:
    """`passed`, or what went wrong: the error's line, `timed out`, or how the process ended."""
    with tempfile.TemporaryDirectory(prefix="tokenspeed-eval-") as folder:
        path = Path(folder) / "program.py"
        path.write_text(source, encoding="utf-8", errors="replace")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(_CHILD.resolve()),
            str(path),
            str(int(limits.timeout_s) + 1),
            str(limits.memory_bytes),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), limits.timeout_s)
        except TimeoutError:
            return "timed out"
        finally:
            await _end(process)
    if said:
        return " ".join(said.decode(errors="replace").split())
    return f"the process ended without a result (status {process.returncode})"


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process and whatever it may have started in its session."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
