# SPDX-License-Identifier: MIT
"""The JSON of `--kv-events-config`: whether and where an engine publishes what changes in its prefix cache."""

from __future__ import annotations

import msgspec

from tokenspeed.config.flags import FlagError

_FLAG = "--kv-events-config"


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Queue lengths and the replay buffer are in batches; a batch is what one step changed."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    """"null" publishes nothing, whatever is enabled."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def parse_kv_events(text: str | None) -> KvEventsConfig:
    """Raises FlagError naming the key that is wrong."""
    if text is None:
        return KvEventsConfig()
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        raise FlagError(_FLAG, str(error)) from None
    if config.publisher not in ("null", "zmq"):
        raise FlagError(_FLAG, f"publisher must be null or zmq, not {config.publisher!r}")
    for key in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, key) < 1:
            raise FlagError(_FLAG, f"{key} must be at least 1")
    return config


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """The address of one attention data-parallel rank: the port moves up by the rank, a path gets a suffix.

    Raises FlagError for an address without a port, or when the port would leave the range.
    """
    if not endpoint.startswith("tcp://"):
        return endpoint if dp_rank == 0 else f"{endpoint}_dp{dp_rank}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise FlagError(_FLAG, f"endpoint {endpoint} has no port")
    number = int(port) + dp_rank
    if number > 65535:
        raise FlagError(_FLAG, f"endpoint {endpoint} leaves no port for rank {dp_rank}")
    return f"{host}:{number}"
