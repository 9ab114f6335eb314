# SPDX-License-Identifier: MIT
"""Who dials the first machine: ranks of the same engine come in, anything else does not."""

from __future__ import annotations

import json
import socket

import pytest

from tokenspeed.config.flags import FlagError
from tokenspeed.config.parallel import ParallelConfig
from tokenspeed.engine.nodes import RankDoor


def two_nodes() -> ParallelConfig:
    """Of two ranks, with a port behind that of collectives which nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1]) - 1
    return ParallelConfig(2, 1, 0, 2, 0, ("cpu",), "127.0.0.1", port, 5.0)


def dial(parallel: ParallelConfig, words: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", parallel.init_port + 1), 10)
    connection.sendall(words)
    return connection


def hello(rank: int, role: str, facts: str = "alike") -> bytes:
    return json.dumps({"rank": rank, "role": role, "facts": facts}).encode() + b"\n"


def test_a_rank_comes_in_whatever_else_knocks() -> None:
    parallel = two_nodes()
    door = RankDoor(parallel, "alike")
    strangers = [dial(parallel, words) for words in (b"GET / HTTP/1.1\r\n\n", hello(7, "orders"), hello(1, "chief"))]
    links = [dial(parallel, hello(1, role)) for role in ("reports", "orders")]
    (peer,) = door.peers()
    assert peer.rank == 1
    links[0].sendall(b'{"beat": true}\n')
    peer.reader.socket.setblocking(True)
    assert peer.reader.take() == [{"beat": True}]
    for connection in (*strangers, *links):
        connection.close()
    door.close()


def test_a_rank_of_another_model_is_refused_by_name() -> None:
    parallel = two_nodes()
    door = RankDoor(parallel, "alike")
    link = dial(parallel, hello(1, "orders", "other"))
    with pytest.raises(FlagError, match=r"--node-rank: the rank at 127\.0\.0\.1 was started with another model"):
        door.peers()
    link.close()
    door.close()


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    parallel = two_nodes()
    door = RankDoor(parallel, "")
    with pytest.raises(FlagError, match="--dist-init-addr: port"):
        RankDoor(parallel, "")
    door.close()
