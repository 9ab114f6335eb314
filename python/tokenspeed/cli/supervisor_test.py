# SPDX-License-Identifier: MIT
"""The supervisor over scripted children: readiness, deaths, the order of stopping, and its patience."""

from __future__ import annotations

import io
import os
import signal
import threading
import time

import pytest

from tests.support.processes import free_port
from tokenspeed.cli.supervisor import Supervisor, SupervisorConfig
from tokenspeed.config.restarts import HEALTHY_S, Restarts

# A gateway that is ready at once; on SIGTERM it works on for `drain` seconds, then says so and ends.
GATEWAY = """
import http.server, os, signal, sys, threading, time
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
def hurry(*_): print("hurried", flush=True); os._exit(0)
def drain(*_):
    signal.signal(signal.SIGTERM, hurry)
    print("draining", flush=True); time.sleep({drain}); print("drained", flush=True); os._exit(0)
server = http.server.HTTPServer(("127.0.0.1", {port}), Ready)
threading.Thread(target=server.serve_forever, daemon=True).start()
signal.signal(signal.SIGTERM, drain)
while True: time.sleep(0.02)
"""
ENGINE = """
import os, signal, sys, time
def stop(*_): print("engine stopping", flush=True); os._exit(0)
signal.signal(signal.SIGTERM, stop)
print("engine is here", flush=True)
deadline = time.monotonic() + {life}
while time.monotonic() < deadline: time.sleep(0.02)
print("engine dies: an invariant", flush=True)
os._exit({status})
"""


def run(
    engine: str,
    drain_s: float = 0.0,
    signal_after: str | None = None,
    drain_timeout_s: float = 5.0,
    signals: int = 1,
    restarts: int = 0,
) -> tuple[int, str]:
    """(status, everything said); when `signal_after` has been said, this process gets SIGTERM."""
    port, out = free_port(), io.StringIO()
    engines, no_keys = ("http://127.0.0.1:9",), (None, None)
    config = SupervisorConfig(
        "127.0.0.1", port, False, 30.0, 20.0, drain_timeout_s, restarts, engines, None, False, *no_keys, {}
    )
    supervisor = Supervisor(config, ["-c", engine], ["-c", GATEWAY.format(port=port, drain=drain_s)], out)

    def send() -> None:
        while signal_after is not None and signal_after not in out.getvalue():
            time.sleep(0.01)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    sender = threading.Thread(target=send, daemon=True)
    if signal_after is not None:
        sender.start()
    try:
        status = supervisor.run()
        if signal_after is not None:
            sender.join(5)
        return status, out.getvalue()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_it_says_when_it_is_ready_and_how_to_try() -> None:
    status, said = run(ENGINE.format(life=60, status=0), signal_after="try: curl http://127.0.0.1:")
    assert status == 0
    assert "[engine] engine is here" in said and "ready in" in said and "/v1/chat/completions" in said


def test_sigterm_drains_the_gateway_before_the_engine_stops() -> None:
    status, said = run(ENGINE.format(life=60, status=0), drain_s=0.5, signal_after="ready in")
    assert status == 0
    assert said.index("draining") < said.index("[gateway] drained") < said.index("[engine] engine stopping")


def test_a_gateway_that_overruns_its_limit_is_killed() -> None:
    started_s = time.monotonic()
    status, said = run(ENGINE.format(life=60, status=0), drain_s=60, signal_after="ready in", drain_timeout_s=0.3)
    assert status == 0 and time.monotonic() - started_s < 20
    assert "drained" not in said and "engine stopping" in said


def test_a_second_signal_ends_the_waiting() -> None:
    started_s = time.monotonic()
    _, said = run(ENGINE.format(life=60, status=0), drain_s=60, signal_after="ready in", drain_timeout_s=60, signals=2)
    assert time.monotonic() - started_s < 20 and "drained" not in said
    assert said.index("draining") < said.index("again: ending what is open") < said.index("[gateway] hurried")
    assert "[engine] engine stopping" in said


@pytest.mark.parametrize(("life", "when"), [(0.0, "before"), (1.5, "after")])
def test_an_engine_that_dies_takes_the_server_down_with_its_status_and_last_words(life: float, when: str) -> None:
    status, said = run(ENGINE.format(life=life, status=3))
    assert status == 3, when
    assert "[engine] engine dies: an invariant" in said
    assert "the engine ended (exit status 3); stopping the gateway too" in said


def test_an_engine_that_is_killed_gives_a_status_that_is_not_zero() -> None:
    status, said = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert status == 1 and "signal SIGKILL" in said


def test_an_engine_that_dies_when_ready_is_started_again_until_there_were_enough() -> None:
    status, said = run(ENGINE.format(life=1.5, status=3), restarts=1)
    assert status == 3
    assert said.count("[engine] engine is here") == 2
    turns = ["starting another in 0.5 s", "ready again after", "stopping the gateway"]
    assert [said.index(turn) for turn in turns] == sorted(said.index(turn) for turn in turns)
    assert "the engine ended (exit status 3) for good (--engine-restarts); stopping the gateway too" in said


def test_an_engine_that_never_became_ready_is_not_started_again() -> None:
    status, said = run(ENGINE.format(life=0.0, status=2), restarts=5)
    assert (status, said.count("[engine] engine is here")) == (2, 1)


def test_a_signal_during_the_pause_ends_the_server() -> None:
    status, said = run(ENGINE.format(life=1.5, status=3), restarts=5, signal_after="starting another")
    assert status == 0 and said.count("[engine] engine is here") == 1


def test_pauses_double_up_to_a_limit_and_a_healthy_child_earns_its_chances_back() -> None:
    restarts = Restarts(9)
    now_s, pauses = 1000.0, []
    for _ in range(9):
        pause_s = restarts.pause_s(now_s)
        assert pause_s is not None
        pauses.append(pause_s)
        now_s += pause_s + 1
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert restarts.pause_s(now_s) is None
    assert restarts.pause_s(now_s + HEALTHY_S) == 0.5


def test_pauses_stay_at_their_limit_however_often_a_child_dies() -> None:
    restarts = Restarts(3000)
    pauses = [restarts.pause_s(float(number)) for number in range(3000)]
    assert pauses[6:] == [30.0] * 2994
