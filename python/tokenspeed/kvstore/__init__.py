# SPDX-License-Identifier: MIT
"""The tiers of KV blocks behind the device: memory for them, and who carries out the scheduler's transfers."""

from tokenspeed.kvstore.arena import HostArena, PinningFailed
from tokenspeed.kvstore.carrier import Carrier, Store
from tokenspeed.kvstore.copier import Copier, DirectCopies, KernelCopies, MemoryCopies, copier_for
from tokenspeed.kvstore.file_store import FileStore
from tokenspeed.kvstore.order import Move, Moved, Names, Order
from tokenspeed.kvstore.spaces import Spaces, lasting_space

__all__ = [
    "Carrier",
    "Copier",
    "DirectCopies",
    "FileStore",
    "HostArena",
    "KernelCopies",
    "MemoryCopies",
    "Move",
    "Moved",
    "Names",
    "Order",
    "PinningFailed",
    "Spaces",
    "Store",
    "copier_for",
    "lasting_space",
]
