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
_ABSENT = {
    "profile_by_stage": "every step is recorded alike; its rows are in the step's own lines of the log",
    "merge_profiles": "each rank writes its own trace; `ts merge-traces` joins them",
}
_FIELDS = ("output_dir", "start_step", "num_steps", "activities", "with_stack", "record_shapes", "profile_prefix")


class ProfileRefused(Exception):
    """What was asked for cannot be recorded; the text names the field."""


@dataclass(frozen=True)
class ProfileOptions:
    """start_step: how many steps since the engine's start are left out; None: none from now on. num_steps: None records
    until the end is asked for. prefix: of the files' names."""

    folder: Path
    start_step: int | None
    prefix: str
    num_steps: int | None
    activities: tuple[str, ...]
    with_stack: bool
    record_shapes: bool


def profile_options(fields: Mapping[str, Any], has_gpu: bool) -> ProfileOptions:
    """What the fields of a request ask for. Raises ProfileRefused."""
    for name, why in _ABSENT.items():
        if fields.get(name):
            raise ProfileRefused(f"{name}: {why}")
    if unknown := sorted(fields.keys() - {*_FIELDS, *_ABSENT}):
        raise ProfileRefused(f"{unknown[0]}: no such field; there are {', '.join(_FIELDS)}")
    folder = fields.get("output_dir") or os.environ.get(FOLDER_ENV)
    if not isinstance(folder, str) or not folder:
        raise ProfileRefused(f"output_dir: must name a folder, since {FOLDER_ENV} of the engine does not")
    prefix = fields.get("profile_prefix") or ""
    if not isinstance(prefix, str) or "/" in prefix:
        raise ProfileRefused(f"profile_prefix: must be the beginning of a file's name, got {prefix!r}")
    for name in ("with_stack", "record_shapes"):
        if not isinstance(fields.get(name) or False, bool):
            raise ProfileRefused(f"{name}: must be true or false")
    return ProfileOptions(
        Path(folder),
        _count(fields, "start_step"),
        prefix,
        _count(fields, "num_steps"),
        _activities(fields.get("activities"), has_gpu),
        bool(fields.get("with_stack")),
        bool(fields.get("record_shapes")),
    )


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    number = fields.get(name)
    if number is not None and (type(number) is not int or number < 1):
        raise ProfileRefused(f"{name}: must be an integer of at least 1, got {number!r}")
    return number


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
        self._waiting: torch.profiler.profile | None = None
        """A profile that begins at a later step."""
        self._start_step = 0
        self._num_steps = 0

    def start(self, fields: Mapping[str, Any]) -> str:
        """Record from now on; what will be written where. Raises ProfileRefused."""
        if self._running is not None or self._waiting is not None:
            raise ProfileRefused("a profile is running already")
        options = profile_options(fields, torch.cuda.is_available())
        now_ms = time.time_ns() // 1_000_000
        second = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ms // 1000))
        name = f"{options.prefix}{second}.{now_ms % 1000:03}-{self.rank}-{os.getpid()}.trace.json"
        path = options.folder / name
        try:
            options.folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except (OSError, ValueError) as error:  # ValueError: a null character
            raise ProfileRefused(f"output_dir: {options.folder}: {getattr(error, 'strerror', error)}") from None
        self._path, self._steps_left = path, options.num_steps
        if options.start_step is not None and options.start_step > self._num_steps:
            self._waiting, self._start_step = _made(options), options.start_step
            return f"will record from step {self._start_step} on; the first rank's trace will be {path}"
        self._record(_made(options))
        return f"recording from step {self._num_steps} on; the first rank's trace will be {path}"

    def _record(self, profile: torch.profiler.profile) -> None:
        try:
            profile.start()
        except RuntimeError as error:  # of a driver that lets nobody record, or lets another tool
            self._path.unlink()
            raise ProfileRefused(f"torch's profiler does not start: {error}") from None
        self._running = profile

    def stop(self) -> str:
        """End the recording and write it. Raises ProfileRefused."""
        if self._waiting is not None:
            self._waiting = None
            self._path.unlink(missing_ok=True)
            return f"step {self._start_step} had not come: nothing was recorded"
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
        """A step has ended: a profile may begin with the next, and the last one of a limited profile ends it."""
        self._num_steps += 1
        if self._waiting is not None and self._num_steps >= self._start_step:
            waiting, self._waiting = self._waiting, None
            try:
                self._record(waiting)
            except ProfileRefused as error:
                logger.warning("%s", error)
            return
        if self._running is None or self._steps_left is None:
            return
        self._steps_left -= 1
        if not self._steps_left:
            self._stop_and_say()

    def close(self) -> None:
        """Write what is recorded still, on the thread that began it: torch's threads do not survive it at exit."""
        if self._running is not None or self._waiting is not None:
            self._stop_and_say()

    def _stop_and_say(self) -> None:
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
