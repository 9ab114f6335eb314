# SPDX-License-Identifier: MIT
"""Addresses of this host."""

from tokenspeed.engine.host_tools import get_local_ip_by_remote

__all__ = ["get_local_ip_by_remote"]
