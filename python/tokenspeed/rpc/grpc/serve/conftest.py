# SPDX-License-Identifier: MIT
"""One engine with the embedded model behind one gRPC server on a thread, and a stub of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from tokenspeed.config.model_source import embedded_model_path
from tokenspeed.engine.offline import Engine
from tokenspeed.rpc.grpc.serve.server import GrpcServer
from tokenspeed_protos import tokenspeed_scheduler_pb2_grpc


@dataclass
class Served:
    """`stub`: blocking calls to the server in front of `engine`."""

    engine: Engine
    server: GrpcServer
    channel: grpc.Channel
    loop: asyncio.AbstractEventLoop

    @property
    def stub(self) -> Any:
        return tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(self.channel)


class RunningServer:
    """A server on a thread of its own, from construction to `stop`."""

    def __init__(self, engine: Engine) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.server = asyncio.run_coroutine_threadsafe(self._started(engine), self.loop).result(60)

    async def _started(self, engine: Engine) -> GrpcServer:
        server = GrpcServer(engine, "127.0.0.1", 0)
        await server.start()
        return server

    def stop(self, drain_s: float) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(drain_s), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    options: dict[str, Any] = {"max_total_tokens": 4096, "max_model_len": 1024, "max_num_seqs": 8, "block_size": 16}
    options["metrics_port"] = 0
    with Engine(str(embedded_model_path()), device="cpu", num_threads=2, log_level="error", **options) as running:
        running.record_kv_events()
        yield running


@pytest.fixture(scope="session")
def served(engine: Engine) -> Iterator[Served]:
    running = RunningServer(engine)
    with grpc.insecure_channel(f"127.0.0.1:{running.server.port}") as channel:
        yield Served(engine, running.server, channel, running.loop)
    running.stop(0.0)
