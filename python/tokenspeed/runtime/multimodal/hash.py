# SPDX-License-Identifier: MIT
"""The identity of an item's content."""

from tokenspeed.engine.media import hash_feature

__all__ = ["hash_feature"]
