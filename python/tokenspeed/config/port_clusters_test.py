# SPDX-License-Identifier: MIT
"""No two listeners of one deployment share a port: by default, and where replicas take the ports behind."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from tokenspeed.config.flags import FlagError, parse_flags
from tokenspeed.config.flags_table import ENGINE_FLAGS, SERVER_FLAGS
from tokenspeed.config.gateway import HONOURED
from tokenspeed.config.port_clusters import check_clusters, clusters_of

NUM_REPLICAS = 8


def kv(**fields: str) -> str:
    return json.dumps({"enable_kv_cache_events": True, **fields})


def raw(words: list[str]) -> dict[str, object]:
    return dict(parse_flags(words, ENGINE_FLAGS).values)


def test_defaults_of_one_deployment_do_not_meet() -> None:
    """A gateway, an engine of eight replicas that publishes behind its lane, and one behind gRPC."""
    gateway, grpc = (parse_flags([], flags).values["port"] for flags in (HONOURED, SERVER_FLAGS))
    handshake = parse_flags([], ENGINE_FLAGS).values["data_parallel_rpc_port"]
    listeners = {
        "gateway": range(gateway, gateway + 1),
        "its control port": range(gateway + 1, gateway + 2),
        "grpc": range(grpc, grpc + 1),
        "handshake": range(handshake, handshake + 1),
        "handshakes of ipc lanes": range(20000, 30000),
        **clusters_of(raw(["--kv-events-config", kv()]), NUM_REPLICAS),
    }
    for (first, ours), (second, theirs) in combinations(listeners.items(), 2):
        assert not set(ours) & set(theirs), (first, second)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rl-control-port", "9000", "--metrics-port", "9000"], "--metrics-port"),
        (["--rl-control-port", "5557", "--kv-events-config", kv()], "--kv-events-config"),
        (["--kv-events-config", kv(replay_endpoint="tcp://*:5557")], "replay_endpoint 5557"),
        (["--kv-events-config", kv(replay_endpoint="tcp://*:5558"), "--data-parallel-size", "2"], "5558 to 5559"),
        (["--metrics-port", "5560", "--kv-events-config", kv(), "--data-parallel-size", "4"], "endpoint 5557 to 5560"),
    ],
)
def test_clusters_that_meet_are_refused_by_flag(words: list[str], told: str) -> None:
    with pytest.raises(FlagError) as refused:
        check_clusters(raw(words))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--rl-control-port", "0", "--metrics-port", "0"],
        ["--kv-events-config", kv(replay_endpoint="tcp://*:5558")],
        ["--kv-events-config", kv(replay_endpoint="tcp://*:5559"), "--data-parallel-size", "2"],
        ["--kv-events-config", kv(replay_endpoint="tcp://*:5557", publisher="null")],
        ["--kv-events-config", kv(endpoint="ipc:///tmp/a", replay_endpoint="ipc:///tmp/b")],
    ],
    ids=str,
)
def test_clusters_that_do_not_meet_are_let_through(words: list[str]) -> None:
    check_clusters(raw(words))
