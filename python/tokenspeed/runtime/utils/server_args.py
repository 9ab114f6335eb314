# SPDX-License-Identifier: MIT
"""Flags of the engine as a dataclass."""

from tokenspeed.config.server_args import PortArgs, ServerArgs, prepare_server_args

__all__ = ["PortArgs", "ServerArgs", "prepare_server_args"]
