# SPDX-License-Identifier: MIT
"""The tiers of KV blocks behind the device: memory for them, and who carries out the scheduler's transfers."""

from tokenspeed.kvstore.arena import HostArena, PinningFailed
from tokenspeed.kvstore.carrier import Carrier
from tokenspeed.kvstore.copier import Copier, DirectCopies, KernelCopies, MemoryCopies, copier_for
from tokenspeed.kvstore.order import Moved, Order

__all__ = [
    "Carrier",
    "Copier",
    "DirectCopies",
    "HostArena",
    "KernelCopies",
    "MemoryCopies",
    "Moved",
    "Order",
    "PinningFailed",
    "copier_for",
]
