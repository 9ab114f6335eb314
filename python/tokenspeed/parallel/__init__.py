# SPDX-License-Identifier: MIT
"""Which rank holds what, and the collectives between layers. Models never call a collective themselves."""

from tokenspeed.parallel.group import Group
from tokenspeed.parallel.placement import Chain, Placement, PlacementError, Stage, add, connect

__all__ = ["Chain", "Group", "Placement", "PlacementError", "Stage", "add", "connect"]
