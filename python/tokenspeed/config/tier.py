# SPDX-License-Identifier: MIT
"""What lies behind the device's KV blocks: host memory. Resolved from the `--kvstore-*` flags. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.config.flags import FlagError

_GB = 10**9


@dataclass(frozen=True)
class TierConfig:
    """The host tier of one rank: `num_bytes`, else `ratio` times the device's pool. by_kernel: on a GPU, whether the
    device copies by itself rather than by one order a piece."""

    ratio: float
    num_bytes: int | None
    by_kernel: bool

    @property
    def sizing_flag(self) -> str:
        """The flag that decides how large it is."""
        return "--kvstore-ratio" if self.num_bytes is None else "--kvstore-size"


def tier_of(raw: Mapping[str, Any]) -> TierConfig | None:
    """raw: `ParsedFlags.values`. None: KV blocks live on the device only. Raises FlagError."""
    ratio, size_gb = raw["kvstore_ratio"], raw["kvstore_size"]
    if ratio is not None and not 0 <= ratio <= 1e6:
        raise FlagError("--kvstore-ratio", f"{ratio:g} is not how many host blocks there are for one of the device")
    if not 0 <= size_gb <= 1e6:
        raise FlagError("--kvstore-size", f"{size_gb:g} is not a size in GB")
    if raw["disable_kvstore"] or not (ratio or size_gb):
        return None
    config = TierConfig(ratio or 0.0, int(size_gb * _GB) if size_gb else None, raw["kvstore_io_backend"] == "kernel")
    if not raw["enable_prefix_caching"]:
        raise FlagError(config.sizing_flag, "the host tier keeps cached prefixes: it needs prefix caching")
    return config
