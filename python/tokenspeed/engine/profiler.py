# SPDX-License-Identifier: MIT
"""torch's profiler around the steps of one rank: what an operator asks for, and the Chrome trace that it leaves.

Used by the loop's thread, on every rank alike; the steps' own thread is recorded too. Writing the trace holds the loop
up. `ts merge-traces` puts the files of several ranks into one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("tokenspeed.engine")

FOLDER_ENV = "TOKENSPEED_TORCH_PROFILER_DIR"
_ACTIVITIES = ("CPU", "GPU", "MEM")
_ABSENT = ("start_step", "profile_by_stage")


class ProfileRefused(Exception):
    """What was asked for cannot be recorded; the text names the field."""


@dataclass(frozen=True)
class ProfileOptions:
    """num_steps: None records until the end is asked for."""

    folder: Path
    num_steps: int | None
    activities: tuple[str, ...]
    with_stack: bool
    record_shapes: bool


def profile_options(fields: Mapping[str, Any], has_gpu: bool) -> ProfileOptions:
    """What the fields of a request ask for. Raises ProfileRefused."""
    for name in _ABSENT:
        if fields.get(name):
            raise ProfileRefused(f"{name}: this release records from now on, every step alike")
    known = {"output_dir", "num_steps", "activities", "with_stack", "record_shapes", *_ABSENT}
    if unknown := sorted(fields.keys() - known):
        raise ProfileRefused(f"{unknown[0]}: no such field")
    folder = fields.get("output_dir") or os.environ.get(FOLDER_ENV)
    if not isinstance(folder, str) or not folder:
        raise ProfileRefused(f"output_dir: must name a folder, since {FOLDER_ENV} of the engine does not")
    num_steps = fields.get("num_steps")
    if num_steps is not None and (type(num_steps) is not int or num_steps < 1):
        raise ProfileRefused(f"num_steps: must be an integer of at least 1, got {num_steps!r}")
    for name in ("with_stack", "record_shapes"):
        if not isinstance(fields.get(name) or False, bool):
            raise ProfileRefused(f"{name}: must be true or false")
    return ProfileOptions(
        Path(folder),
        num_steps,
        _activities(fields.get("activities"), has_gpu),
        bool(fields.get("with_stack")),
        bool(fields.get("record_shapes")),
    )


def _activities(asked: Any, has_gpu: bool) -> tuple[str, ...]:
    if not asked:
        return ("CPU", "GPU") if has_gpu else ("CPU",)
    if not isinstance(asked, (list, tuple)) or not all(name in _ACTIVITIES for name in asked):
        raise ProfileRefused(f"activities: must be a list of {', '.join(_ACTIVITIES)}")
    if "GPU" in asked and not has_gpu:
        raise ProfileRefused("activities: GPU: there is none")
    return tuple(asked)


class Profiler:
    """At most one profile at a time."""

    def __init__(self) -> None:
        self.rank = "dp0-tp0"
        """Of this process, in the names of its files."""
        self._running: torch.profiler.profile | None = None
        self._path = Path()
        self._steps_left: int | None = None

    def start(self, fields: Mapping[str, Any]) -> str:
        """Record from now on; what will be written where. Raises ProfileRefused."""
        if self._running is not None:
            raise ProfileRefused("a profile is running already")
        options = profile_options(fields, torch.cuda.is_available())
        now_ms = time.time_ns() // 1_000_000
        second = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ms // 1000))
        name = f"{second}.{now_ms % 1000:03}-{self.rank}-{os.getpid()}.trace.json"
        path = options.folder / name
        try:
            options.folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise ProfileRefused(f"output_dir: {options.folder}: {error.strerror}") from None
        profile = _made(options)
        try:
            profile.start()
        except RuntimeError as error:  # of a driver that lets nobody record, or lets another tool
            path.unlink()
            raise ProfileRefused(f"torch's profiler does not start: {error}") from None
        self._running, self._path, self._steps_left = profile, path, options.num_steps
        return f"recording; the first rank's trace will be {path}"

    def stop(self) -> str:
        """End the recording and write it. Raises ProfileRefused."""
        if self._running is None:
            raise ProfileRefused("no profile is running")
        running, self._running = self._running, None
        try:
            running.stop()
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            raise ProfileRefused(f"{self._path}: {error}") from None
        return f"the first rank's trace is {self._path}"

    def settled(self) -> None:
        """A step has ended: the last one of a limited profile ends it."""
        if self._running is None or self._steps_left is None:
            return
        self._steps_left -= 1
        if not self._steps_left:
            try:
                logger.info("%s", self.stop())
            except ProfileRefused as error:
                logger.warning("%s", error)


def _made(options: ProfileOptions) -> torch.profiler.profile:
    kinds = {"CPU": torch.profiler.ProfilerActivity.CPU, "GPU": torch.profiler.ProfilerActivity.CUDA}
    return torch.profiler.profile(
        activities=[kinds[name] for name in options.activities if name in kinds] or [kinds["CPU"]],
        profile_memory="MEM" in options.activities,
        with_stack=options.with_stack,
        record_shapes=options.record_shapes,
        # The model runs on another thread than the loop, who starts this.
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    )
