# SPDX-License-Identifier: MIT
"""Which classes would carry KV blocks between a prefill and a decode engine: this engine serves both and has none."""

from __future__ import annotations

import enum
from typing import NoReturn


class TransferBackend(enum.Enum):
    MOONCAKE = "mooncake"


class KVClassType(enum.Enum):
    MANAGER = "manager"
    SENDER = "sender"
    RECEIVER = "receiver"
    BOOTSTRAP_SERVER = "bootstrap_server"


def get_kv_class(backend: TransferBackend, kind: KVClassType) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(f"{backend.value}/{kind.value}: this release serves prefill and decode in one engine")
