# SPDX-License-Identifier: MIT
"""A scripted engine behind gRPC: a real server on a loopback port and a thread of its own, with the scripts of
`fake_engine`. It answers as the released protocol has it: a stop token is named beside the tokens, not among them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tokenspeed.gateway.testing.fake_engine import Script, Step
from tokenspeed.rpc.lane import wire
from tokenspeed_protos import common_pb2, tokenspeed_scheduler_pb2_grpc
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb

_CODES = {400: grpc.StatusCode.INVALID_ARGUMENT, 429: grpc.StatusCode.RESOURCE_EXHAUSTED, 500: grpc.StatusCode.INTERNAL}


class FakeServicer(tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerServicer):
    """Serves from construction to `stop`. `port`: 0 takes a free one. `tls`: PEM of the CA that clients' certificates
    must have, of its own key and its own certificate."""

    def __init__(
        self, script: Script, port: int = 0, tls: tuple[bytes, bytes, bytes] | None = None, **server_args: Any
    ) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.traceparents: list[str | None] = []
        """Of each of them."""
        self.aborted: list[str] = []
        self.num_active = 0
        self.flush_answer = (True, "ok")
        self.profiles: list[common_pb2.StartProfileRequest | common_pb2.StopProfileRequest] = []
        self.is_healthy = True
        self.num_checks = self.num_loads = 0
        """Times that it was asked for its health, and for its load."""
        self._script, self._args, self._tls = script, server_args, tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(port), self._loop).result(20)

    @property
    def url(self) -> str:
        """The worker URL."""
        return f"grpc{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Break every connection."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result(20)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    async def _start(self, port: int) -> int:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        tokenspeed_scheduler_pb2_grpc.add_TokenSpeedSchedulerServicer_to_server(self, self._server)
        address = f"127.0.0.1:{port}"
        if self._tls is None:
            bound = self._server.add_insecure_port(address)
        else:
            ca, key, certificate = self._tls
            credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
            bound = self._server.add_secure_port(address, credentials)
        await self._server.start()
        return bound

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        self.num_checks += 1
        return pb.HealthCheckResponse(healthy=self.is_healthy, message="" if self.is_healthy else "out of sorts")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(served_model_name="fake-model", max_context_length=8192)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        answer = pb.GetServerInfoResponse(max_total_num_tokens=16384, tokenspeed_version="fake")
        answer.server_args.update({"page_size": 16, **self._args})
        return answer

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        self.num_loads += 1
        load = pb.SchedulerLoad(dp_rank=0, num_running_reqs=self.num_active, num_waiting_reqs=2, token_usage=0.5)
        return pb.GetLoadsResponse(loads=[load])

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: Any) -> common_pb2.FlushCacheResponse:
        success, message = self.flush_answer
        return common_pb2.FlushCacheResponse(success=success, message=message)

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: Any) -> common_pb2.ProfileResponse:
        self.profiles.append(request)
        return common_pb2.ProfileResponse(success=True, message="/traces")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Any) -> common_pb2.ProfileResponse:
        self.profiles.append(request)
        return common_pb2.ProfileResponse(success=False, message="nothing is recorded")

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self.aborted.append(request.request_id)
        return pb.AbortResponse(success=True)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.traceparents.append(dict(context.invocation_metadata() or ()).get("traceparent"))
        self.num_active += 1
        try:
            tokens: list[int] = []
            for step in self._script(_asked(request)):
                if step.delay_s:
                    await asyncio.sleep(step.delay_s)
                if step.status is not None:
                    await context.abort(_CODES[step.status], step.message)
                shown = step.tokens[:-1] if step.finish == "stop" else step.tokens
                tokens += shown
                if request.stream and shown:
                    yield self._chunk(request, shown, len(tokens), step)
                if step.finish:
                    yield self._complete(request, tokens, step)
                    return
        finally:
            self.num_active -= 1

    def _chunk(self, request: pb.GenerateRequest, shown: Any, total: int, step: Step) -> pb.GenerateResponse:
        chunk = pb.GenerateStreamChunk(
            token_ids=shown,
            prompt_tokens=len(request.tokenized.input_ids),
            completion_tokens=total,
            cached_tokens=step.cached,
            output_logprobs=_logprobs(request, shown),
        )
        return pb.GenerateResponse(request_id=request.request_id, chunk=chunk)

    def _complete(self, request: pb.GenerateRequest, tokens: list[int], step: Step) -> pb.GenerateResponse:
        complete = pb.GenerateComplete(
            output_ids=tokens,
            finish_reason=step.finish,
            prompt_tokens=len(request.tokenized.input_ids),
            completion_tokens=len(tokens),
            cached_tokens=step.cached,
            output_logprobs=_logprobs(request, tokens),
        )
        if step.finish == "stop":
            complete.matched_token_id = step.tokens[-1]
        return pb.GenerateResponse(request_id=request.request_id, complete=complete)


def _logprobs(request: pb.GenerateRequest, tokens: Any) -> pb.OutputLogProbs | None:
    if not request.return_logprob:
        return None
    width = request.top_logprobs_num
    tops = [
        pb.TopLogProbs(values=[-0.5 - i for i in range(width)], token_ids=[token + i for i in range(width)])
        for token in tokens
    ]
    return pb.OutputLogProbs(token_logprobs=[-0.5] * len(tokens), token_ids=tokens, top_logprobs=tops)


def _asked(request: pb.GenerateRequest) -> wire.TokenizedGenerateReqInput:
    """As much of the request as scripts read."""
    sent = request.sampling_params
    nothing = dict.fromkeys(wire.MoreSamplingParamsWire.__struct_fields__)
    sampling: Any = nothing | {"max_new_tokens": sent.max_new_tokens, "ignore_eos": sent.ignore_eos}
    return wire.TokenizedGenerateReqInput(
        rid=request.request_id,
        http_worker_ipc=None,
        input_text=None,
        input_ids=list(request.tokenized.input_ids),
        sampling_params=wire.MoreSamplingParamsWire(**sampling),
        return_logprob=request.return_logprob,
        logprob_start_len=request.logprob_start_len,
        top_logprobs_num=request.top_logprobs_num,
        token_ids_logprob=None,
        stream=request.stream,
    )
