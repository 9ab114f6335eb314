# SPDX-License-Identifier: MIT
"""Counts kernels that Triton compiles or loads after the engine said that it is ready. The count stays 0.

A late one stalls every running request, so each is a warning that names the kernel and what it was specialised on.
`watch` is called by `core` at the end of the warm-up, `stop` when the loop has ended; a process has one hook, the
last engine's. It runs on the thread that launches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("tokenspeed.engine")


class LateCompiles:
    """How many there were since `watch`. `on_late`: told of each, with the seconds that it took."""

    def __init__(self, on_late: Callable[[float], None]) -> None:
        self.count = 0
        self._on_late = on_late
        self._begun_s = 0.0
        self._watching = False

    def watch(self) -> None:
        """From now on every compilation counts."""
        import triton

        triton.knobs.runtime.jit_cache_hook = self._begins
        triton.knobs.runtime.jit_post_compile_hook = self._compiled
        self._watching = True

    def stop(self) -> None:
        """Another engine of the process may warm up now."""
        if not self._watching:
            return
        import triton

        if triton.knobs.runtime.jit_post_compile_hook == self._compiled:
            triton.knobs.runtime.jit_post_compile_hook = None
            triton.knobs.runtime.jit_cache_hook = None

    def _begins(self, **_details: Any) -> bool:
        """False: go on and compile."""
        self._begun_s = time.perf_counter()
        return False

    def _compiled(self, **details: Any) -> None:
        self.count += 1
        self._on_late(time.perf_counter() - self._begun_s)
        logger.warning("a kernel was compiled after ready: %s", str(details.get("repr", "unnamed"))[:200])
