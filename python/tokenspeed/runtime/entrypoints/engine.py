# SPDX-License-Identifier: MIT
"""Starting an engine."""

from tokenspeed.engine.served_start import ServedEngine as Engine
from tokenspeed.engine.served_start import launch as _launch_subprocesses
from tokenspeed.engine.served_start import launch_headless as launch_scheduler_headless

__all__ = ["Engine", "_launch_subprocesses", "launch_scheduler_headless"]
