# SPDX-License-Identifier: MIT
"""A gateway, ours or the released one, in front of headless engines of ours over one ZMQ lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.interop.asking import Asker
from tests.support.peers import Http, Program, headless_engine
from tests.support.server import free_port


class Lane:
    """A gateway and its engines, ready."""

    def __init__(self, gateway: Program, engines: list[Program], controls: list[Http], port: int) -> None:
        self.gateway, self.engines, self.controls = gateway, engines, controls
        self.ask = Asker(port)
        self.wait_ready()

    def wait_ready(self) -> None:
        self.gateway.wait_for(lambda: self.ask.http.status("/readiness") == 200)

    def is_idle(self) -> bool:
        """No engine runs a request or holds blocks of one."""
        loads = [control.get("/v1/loads")["loads"][0] for control in self.controls]
        return all(load["num_reqs"] == 0 and load["num_pages"] == 0 for load in loads)


def start(
    launch: Callable[..., Program], url: str, lane_port: int, num_ranks: int, model_folder: Path
) -> Iterator[Lane]:
    """launch: `own_gateway` or `released_gateway`."""
    port, controls = free_port(), [free_port() for _ in range(num_ranks)]
    engines = [
        headless_engine(lane_port, "--zmq-engine-index", str(rank), "--rl-control-port", str(controls[rank]))
        for rank in range(num_ranks)
    ]
    worker = ("--backend", "tokenspeed", "--worker-urls", url, "--zmq-engine-count", str(num_ranks))
    gateway = launch(port, model_folder, *worker)
    try:
        yield Lane(gateway, engines, [Http(control) for control in controls], port)
    finally:
        for program in [gateway, *engines]:
            program.kill()
