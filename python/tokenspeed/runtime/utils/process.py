# SPDX-License-Identifier: MIT
"""Processes of this host."""

from tokenspeed.engine.host_tools import kill_process_tree

__all__ = ["kill_process_tree"]
