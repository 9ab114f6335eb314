# SPDX-License-Identifier: MIT
"""What lies behind the device's KV blocks: host memory, and a folder. Resolved from the `--kvstore-*` flags. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.config.flags import FlagError, json_object

_GB = 10**9
_RATIO_WITH_STORE = 2.0
_BACKEND, _EXTRA = "--kvstore-storage-backend", "--kvstore-storage-backend-extra-config"
_REFUSED = {
    "mooncake": "its package needs the libraries of RDMA and CUDA, and none of it has run here; use file",
    "memory": "the host tier is this process's memory already: see --kvstore-ratio; use file to outlive it",
}
_EXTRA_KEYS = {"path", "max_gb", "wait_s"}


@dataclass(frozen=True)
class FolderConfig:
    """Where blocks outlive the engine. wait_s: how long a request may wait for what is there."""

    path: str
    max_bytes: int
    wait_s: float


@dataclass(frozen=True)
class TierConfig:
    """The host tier of one rank: `num_bytes`, else `ratio` times the device's pool. by_kernel: on a GPU, whether the
    device copies by itself rather than by one order a piece. store: behind the host tier."""

    ratio: float
    num_bytes: int | None
    by_kernel: bool
    store: FolderConfig | None = None

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
    store = _store(raw)
    if raw["disable_kvstore"]:
        return None
    if store is not None and not size_gb:
        ratio = _RATIO_WITH_STORE if ratio is None else ratio
        if not ratio:
            raise FlagError(_BACKEND, "its blocks pass through host memory: give a --kvstore-ratio above 0")
    if not (ratio or size_gb):
        return None
    num_bytes = int(size_gb * _GB) if size_gb else None
    config = TierConfig(ratio or 0.0, num_bytes, raw["kvstore_io_backend"] == "kernel", store)
    if not raw["enable_prefix_caching"]:
        flag = config.sizing_flag if store is None else _BACKEND
        raise FlagError(flag, "the host tier keeps cached prefixes: it needs prefix caching")
    return config


def _store(raw: Mapping[str, Any]) -> FolderConfig | None:
    backend, extra = raw["kvstore_storage_backend"], json_object(raw, "kvstore_storage_backend_extra_config")
    if backend in _REFUSED:
        raise FlagError(_BACKEND, f"{backend}: {_REFUSED[backend]}")
    if backend is None:
        if extra:
            raise FlagError(_EXTRA, f"goes with {_BACKEND} file")
        return None
    for key in extra:
        if key not in _EXTRA_KEYS:
            raise FlagError(_EXTRA, f"{key!r} is not one of {', '.join(sorted(_EXTRA_KEYS))}")
    path = extra.get("path")
    if not isinstance(path, str) or not path:
        raise FlagError(_EXTRA, 'the file backend needs a "path": the folder for its blocks')
    max_gb, wait_s = _number(extra, "max_gb", 64.0), _number(extra, "wait_s", 2.0)
    return FolderConfig(path, int(max_gb * _GB), wait_s)


def _number(extra: Mapping[str, Any], key: str, default: float) -> float:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
        raise FlagError(_EXTRA, f"{key} must be a number above 0, got {value!r}")
    return float(value)
