# SPDX-License-Identifier: MIT
"""A gateway, ours or the released one, in front of engines of ours: headless on one ZMQ lane, or behind gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.interop.asking import Asker
from tests.support.peers import Http, Program, grpc_engine, grpc_serves, headless_engine
from tests.support.processes import free_port


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


class Workers:
    """A gateway in front of gRPC engines, ready."""

    def __init__(
        self, launch: Callable[..., Program], num_engines: int, model_folder: Path | None, *gateway_flags: str
    ) -> None:
        self.ports = [free_port() for _ in range(num_engines)]
        controls = [free_port() for _ in range(num_engines)]
        self.controls = [Http(port) for port in controls]
        self.engines = [
            grpc_engine(port, "--block-size", "16", "--rl-control-port", str(control))
            for port, control in zip(self.ports, controls)
        ]
        for engine, port in zip(self.engines, self.ports):
            engine.wait_for(lambda port=port: grpc_serves(port))  # type: ignore[misc]
        http_port = free_port()
        urls = [self.url(index) for index in range(num_engines)]
        self.gateway = launch(http_port, model_folder, *gateway_flags, "--worker-urls", *urls)
        self.ask = Asker(http_port)
        self.wait_ready()

    def url(self, index: int) -> str:
        return f"grpc://127.0.0.1:{self.ports[index]}"

    def wait_ready(self) -> None:
        self.gateway.wait_for(self.ask.serves)

    def is_idle(self) -> bool:
        loads = [control.get("/v1/loads")["loads"][0] for control in self.controls]
        return all(load["num_reqs"] == 0 and load["num_pages"] == 0 for load in loads)

    def stop(self) -> None:
        for program in [self.gateway, *self.engines]:
            program.kill()
