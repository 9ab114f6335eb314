# SPDX-License-Identifier: MIT
"""Requests to an encoder."""

from tokenspeed.engine.media import EncodeRequest

__all__ = ["EncodeRequest"]
