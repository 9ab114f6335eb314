# SPDX-License-Identifier: MIT
"""The gRPC server: services, reflection, health, warm-up, drain. One per process, on the main thread's event loop.

`grpc.health.v1` says SERVING once a token has come through the server's own port, and NOT_SERVING from the first
signal on, from which running requests have `drain_s` to end. A server whose engine dies ends with status 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tokenspeed.config.flags import FlagError
from tokenspeed.engine.offline import Engine
from tokenspeed.rpc.grpc.limits import max_message_bytes, message_options, server_options
from tokenspeed.rpc.grpc.serve.guard import Guard
from tokenspeed.rpc.grpc.serve.servicer import EncoderServicer, SchedulerServicer
from tokenspeed_protos import (
    tokenspeed_encoder_pb2,
    tokenspeed_encoder_pb2_grpc,
    tokenspeed_scheduler_pb2,
    tokenspeed_scheduler_pb2_grpc,
)

logger = logging.getLogger("tokenspeed.grpc")

SKIP_WARMUP_ENV = "TOKENSPEED_SKIP_GRPC_WARMUP"
WARMUP_LIMIT_S = 600.0
_ALIVE_POLL_S = 0.5
_SERVICES = (
    tokenspeed_scheduler_pb2.DESCRIPTOR.services_by_name["TokenSpeedScheduler"].full_name,
    tokenspeed_encoder_pb2.DESCRIPTOR.services_by_name["TokenSpeedEncoder"].full_name,
    health.SERVICE_NAME,
    reflection.SERVICE_NAME,
)


class GrpcServer:
    """Listens from `start` to `stop`; the engine is the caller's."""

    def __init__(self, engine: Engine, host: str, port: int, reasoning_parser: str | None = None) -> None:
        self.servicer = SchedulerServicer(engine, reasoning_parser)
        self._engine = engine
        self._limit_bytes = max_message_bytes()
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(interceptors=[Guard()], options=server_options(self._limit_bytes))
        tokenspeed_scheduler_pb2_grpc.add_TokenSpeedSchedulerServicer_to_server(self.servicer, self._server)
        tokenspeed_encoder_pb2_grpc.add_TokenSpeedEncoderServicer_to_server(EncoderServicer(), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(_SERVICES, self._server)
        self._host = host
        try:
            self.port = self._server.add_insecure_port(_address(host, port))
        except RuntimeError:
            raise FlagError("--port", f"{host}:{port} cannot be listened on") from None

    async def start(self) -> None:
        """Listen, warm up, say SERVING. Raises grpc.aio.AioRpcError when no token comes."""
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        if os.environ.get(SKIP_WARMUP_ENV, "").lower() not in ("1", "true", "yes"):
            await self._warm_up()
        await self._say(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, drain_s: float) -> None:
        """Take nothing new, let what runs end, stop listening."""
        self.servicer.draining = True
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        deadline_s = time.monotonic() + drain_s
        while self.servicer.num_live and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        await self._server.stop(1.0)

    async def _say(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *_SERVICES[:2]):
            await self._health.set(name, status)

    async def _warm_up(self) -> None:
        """A token of every replica through the port: transport, services and engine."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "") else "[::1]" if self._host == "::" else self._host
        async with grpc.aio.insecure_channel(
            _address(host, self.port), options=message_options(self._limit_bytes)
        ) as channel:
            stub = tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(channel)
            request = tokenspeed_scheduler_pb2.GenerateRequest(request_id="WARMUP")
            request.tokenized.input_ids.append(0)
            request.sampling_params.temperature, request.sampling_params.max_new_tokens = 0.0, 1
            for rank in range(self._engine.num_replicas):
                request.data_parallel_rank = rank
                async for _ in stub.Generate(request, timeout=WARMUP_LIMIT_S, wait_for_ready=True):
                    pass


async def serve(engine: Engine, host: str, port: int, drain_s: float, reasoning_parser: str | None) -> int:
    """Until a signal, or until the engine dies. The exit status."""
    server = GrpcServer(engine, host, port, reasoning_parser)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await server.start()
    logger.info("gRPC at %s", _address(host, server.port))
    while engine.is_alive and not stopping.is_set():
        try:
            await asyncio.wait_for(stopping.wait(), _ALIVE_POLL_S)
        except TimeoutError:
            pass
    died = not engine.is_alive
    await server.stop(0.0 if died else drain_s)
    return 1 if died else 0


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
