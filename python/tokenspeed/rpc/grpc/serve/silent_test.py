# SPDX-License-Identifier: MIT
"""Peers that fall silent without a word, as a host that loses its power: the server notices, with calls and without."""

from __future__ import annotations

import socket
import threading

import grpc
import pytest

from tests.support.processes import wait_until
from tokenspeed.engine.offline import Engine
from tokenspeed.rpc.grpc.limits import KEEPALIVE_ENV, KEEPALIVE_TIMEOUT_ENV, LimitError, keepalive_options
from tokenspeed.rpc.grpc.serve.conftest import RunningServer
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb
from tokenspeed_protos.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub


class Wire:
    """A proxy of one connection. Once `cut` is set it hands nothing on, and closes nothing by itself."""

    def __init__(self, port: int) -> None:
        self.cut = threading.Event()
        self.server_hung_up = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._upstream = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        threading.Thread(target=self._pump, args=(client, self._upstream, threading.Event()), daemon=True).start()
        self._pump(self._upstream, client, self.server_hung_up)

    def _pump(self, source: socket.socket, target: socket.socket, ended: threading.Event) -> None:
        try:
            while part := source.recv(1 << 16):
                if not self.cut.is_set():
                    target.sendall(part)
        except OSError:
            pass
        ended.set()

    def close(self) -> None:
        self._listener.close()
        self._upstream.close()


def asked() -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0.0, max_new_tokens=150, ignore_eos=True)
    tokenized = pb.TokenizedInput(input_ids=[5, 6, 7])
    return pb.GenerateRequest(request_id="silent", tokenized=tokenized, sampling_params=params, stream=True)


@pytest.mark.parametrize("calls", [True, False])
def test_a_client_that_falls_silent_is_given_up_and_its_request_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, calls: bool
) -> None:
    monkeypatch.setenv(KEEPALIVE_ENV, "1000")
    monkeypatch.setenv(KEEPALIVE_TIMEOUT_ENV, "1000")
    running = RunningServer(engine)
    between = Wire(running.server.port)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{between.port}") as channel:
            stub = TokenSpeedSchedulerStub(channel)
            if calls:
                call = stub.Generate(asked())
                next(call)
                engine.operations.pause("keep", 10)  # it would end by itself, and be forgotten for that
            else:
                assert stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
            assert running.server.servicer.num_live == calls
            between.cut.set()
            assert between.server_hung_up.wait(30)
            wait_until(lambda: not running.server.servicer.num_live)
    finally:
        engine.operations.resume()
        between.close()
        running.stop(0.0)
    wait_until(lambda: not engine.load().active_blocks)


def test_a_client_that_is_only_slow_keeps_its_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers pings, however long nothing else is said."""
    monkeypatch.setenv(KEEPALIVE_ENV, "1000")
    monkeypatch.setenv(KEEPALIVE_TIMEOUT_ENV, "1000")
    running = RunningServer(engine)
    between = Wire(running.server.port)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{between.port}") as channel:
            call = TokenSpeedSchedulerStub(channel).Generate(asked())
            next(call)
            engine.operations.pause("keep", 10)
            assert not between.server_hung_up.wait(4)
            engine.operations.resume()
            assert [r.complete.finish_reason for r in call][-1] == "length"
    finally:
        engine.operations.resume()
        between.close()
        running.stop(0.0)


def test_the_times_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("grpc.keepalive_time_ms", 30_000) in keepalive_options()
    monkeypatch.setenv(KEEPALIVE_ENV, str(2**40))
    assert ("grpc.keepalive_time_ms", 2**31 - 1) in keepalive_options()
    monkeypatch.setenv(KEEPALIVE_TIMEOUT_ENV, "soon")
    with pytest.raises(LimitError, match=KEEPALIVE_TIMEOUT_ENV):
        keepalive_options()
