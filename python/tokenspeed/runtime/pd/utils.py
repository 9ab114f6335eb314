# SPDX-License-Identifier: MIT
"""Transfers of KV blocks between engines."""

from tokenspeed.engine.transfer_kinds import KVClassType, TransferBackend, get_kv_class

__all__ = ["KVClassType", "TransferBackend", "get_kv_class"]
