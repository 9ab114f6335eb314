# SPDX-License-Identifier: MIT
"""What `--kv-events-config` says, what it may not say, and the address of each rank."""

from __future__ import annotations

import pytest

from tokenspeed.config.flags import FlagError
from tokenspeed.config.kv_events import parse_kv_events, rank_endpoint


def test_the_reference_configuration_is_read() -> None:
    text = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","topic":"kv-events"}'
    config = parse_kv_events(text)
    assert config.publishes
    assert (config.publisher, config.topic, config.buffer_steps) == ("zmq", "kv-events", 10_000)


@pytest.mark.parametrize(
    "text", [None, "{}", '{"publisher":"zmq"}', '{"enable_kv_cache_events":true,"publisher":"null"}']
)
def test_it_takes_both_keys_to_publish(text: str | None) -> None:
    assert not parse_kv_events(text).publishes


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"publisher":"kafka"}', "publisher"),
        ('{"bufer_steps":1}', "bufer_steps"),
        ('{"buffer_steps":0}', "buffer_steps"),
        ('{"hwm":"x"}', "hwm"),
        ("{", "kv-events-config"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(text: str, key: str) -> None:
    with pytest.raises(FlagError, match=key):
        parse_kv_events(text)


def test_each_rank_has_its_own_address() -> None:
    assert rank_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert rank_endpoint("tcp://*:5557", 3) == "tcp://*:5560"
    assert rank_endpoint("ipc:///tmp/kv", 0) == "ipc:///tmp/kv"
    assert rank_endpoint("ipc:///tmp/kv", 2) == "ipc:///tmp/kv_dp2"
    with pytest.raises(FlagError, match="no port"):
        rank_endpoint("tcp://host", 0)
    with pytest.raises(FlagError, match="rank 1"):
        rank_endpoint("tcp://*:65535", 1)
