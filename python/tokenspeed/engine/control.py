# SPDX-License-Identifier: MIT
"""Calls to the engine itself, between two steps: what exists is done, what does not is refused by name."""

from __future__ import annotations

from typing import Any

from tokenspeed.engine.profiler import Profiler, ProfileRefused
from tokenspeed_cc import Scheduler


class Controls:
    """Runs on the loop's thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.profiler = Profiler()
        self._scheduler = scheduler

    def call(self, method: str, args: list[Any]) -> tuple[bool, str]:
        """(success, message). A bad argument is an answer, not an exception."""
        if method == "flush_cache":
            return self._flush_cache()
        try:
            if method == "start_profile":
                return True, self.profiler.start(args[0] if args and isinstance(args[0], dict) else {})
            if method == "stop_profile":
                return True, self.profiler.stop()
        except ProfileRefused as error:
            return False, f"{method}: {error}"
        return False, f"{method}: no such call"

    def _flush_cache(self) -> tuple[bool, str]:
        """The timeout that callers may send is not waited for: the answer says whether anything ran."""
        if self._scheduler.flush_cache():
            return True, "the prefix cache is empty"
        return False, "requests are running; nothing was flushed"
