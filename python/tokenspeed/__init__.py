# SPDX-License-Identifier: MIT
"""TokenSpeed: an inference engine and gateway for agents.

Importing the package is cheap: the engine, and torch with it, load when `Engine` or `AsyncLLM` is first touched, so
that the gateway and the commands, which share the package, never pay for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenspeed.version import __version__

if TYPE_CHECKING:
    from tokenspeed.config.sampling import RequestError, SamplingParams
    from tokenspeed.engine.async_llm import AsyncLLM
    from tokenspeed.engine.offline import Engine, RequestOutput

__all__ = ["AsyncLLM", "Engine", "RequestError", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncLLM": "tokenspeed.engine.async_llm",
    "Engine": "tokenspeed.engine.offline",
    "RequestOutput": "tokenspeed.engine.offline",
    "RequestError": "tokenspeed.config.sampling",
    "SamplingParams": "tokenspeed.config.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenspeed' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
