# SPDX-License-Identifier: MIT
"""The service `TokenSpeedScheduler` in front of an engine in this process, and `TokenSpeedEncoder`, which it has not.

Runs on the event loop's thread; the engine's loop has its own. A call that its caller leaves is aborted; one that the
engine leaves ends with UNAVAILABLE. What has to wait for the engine's loop waits in a worker thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import cached_property
from typing import Any, TypeAlias

import grpc

from tokenspeed.config.sampling import RequestError
from tokenspeed.engine.errors import EngineDeadError, OperationError
from tokenspeed.engine.local_frontend import Delta, LocalFrontend
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.token_steps import token_steps
from tokenspeed.gateway.text.tokenizer_files import tokenizer_archive, tokenizer_files
from tokenspeed.rpc.grpc.serve.answers import ChoiceAnswer
from tokenspeed.rpc.grpc.serve.errors import refuse
from tokenspeed.rpc.grpc.serve.info import EngineInfo
from tokenspeed.rpc.grpc.serve.kv_stream import BatchesLost, kv_stream
from tokenspeed.rpc.grpc.serve.meter import LoadMeter
from tokenspeed.rpc.grpc.serve.requests import GenerateJob, belongs_to, to_job
from tokenspeed_protos import common_pb2, tokenspeed_encoder_pb2_grpc, tokenspeed_scheduler_pb2_grpc
from tokenspeed_protos import tokenspeed_encoder_pb2 as encoder_pb
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb

Context: TypeAlias = grpc.aio.ServicerContext

HEALTH_LIMIT_S, HEALTH_POLL_S = 20.0, 0.1
FLUSH_PAUSE_S, FLUSH_GRACE_S = 0.05, 2.0
CHUNK_BYTES = 64 * 1024


class SchedulerServicer(tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerServicer):
    """engine: with a tokenizer, feeding KV events. reasoning_parser: what gateways are told of it."""

    def __init__(self, engine: Engine, reasoning_parser: str | None) -> None:
        self.draining = False
        self._engine = engine
        self._meters = [LoadMeter() for _ in range(engine.num_replicas)]
        self._info = EngineInfo(engine, self._meters, reasoning_parser)
        self._live: set[str] = set()
        self._probes = 0

    @property
    def num_live(self) -> int:
        """Calls of `Generate` that have not ended."""
        return len(self._live)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        if self.draining:
            await refuse(context, 503, "draining", "", "the server is shutting down")
        try:
            traceparent = dict(context.invocation_metadata() or ()).get("traceparent")
            engine = self._engine
            admission = engine.config.admission
            job = to_job(request, self._info.sampling_defaults, admission, engine.num_replicas, traceparent)
        except RequestError as error:
            await refuse(context, 400, error.code, error.field, error.message)
        if job.request_id in self._live:
            await refuse(context, 409, "duplicate_request_id", "request_id", f"{job.request_id!r} is in use")
        self._live.add(job.request_id)
        try:
            async for response in self._answers(job, context):
                yield response
        except RequestError as error:
            await refuse(context, 400, error.code, error.field, error.message)
        except EngineDeadError as error:
            await refuse(context, 503, "engine_dead", "", str(error))
        finally:
            self._live.discard(job.request_id)

    async def _answers(self, job: GenerateJob, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        data_rank = self._engine.frontend.place(job.adds[0].data_rank)
        job = job.placed(data_rank)
        choices = {
            add.rid: ChoiceAnswer(index, add.params, self._engine.tokenizer, job.streams, job.keeps_stop)
            for index, add in enumerate(job.adds)
        }
        open_choices = len(choices)
        async with aclosing(token_steps(self._engine.frontend, job.adds)) as steps:
            async for deltas in steps:
                for delta in deltas:
                    await _refuse_rejected(delta, context)
                    for response in self._feed(job, choices[delta.rid], delta, self._meters[data_rank]):
                        open_choices -= response.HasField("complete")
                        yield response
                if not open_choices:
                    return  # a stop string may be ahead of the engine's own end

    def _feed(
        self, job: GenerateJob, choice: ChoiceAnswer, delta: Delta, meter: LoadMeter
    ) -> list[pb.GenerateResponse]:
        meter.sent(len(delta.token_ids))
        messages, stopped = choice.feed(delta)
        if stopped:
            self._engine.frontend.end([delta.rid])
        responses = []
        for message in messages:
            if isinstance(message, pb.GenerateComplete):
                meter.ended(message.prompt_tokens, message.cached_tokens)
                responses.append(pb.GenerateResponse(request_id=job.request_id, complete=message))
            else:
                responses.append(pb.GenerateResponse(request_id=job.request_id, chunk=message))
        return responses

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Every replica that is left generates a token, or others meanwhile; a paused engine only has to answer."""
        if self.draining:
            return pb.HealthCheckResponse(healthy=False, message="the server is shutting down")
        try:
            async with asyncio.timeout(HEALTH_LIMIT_S):
                if self._engine.operations.is_paused:
                    await asyncio.to_thread(self._engine.operations.load_numbers)
                else:
                    await asyncio.gather(*map(self._see_a_token, self._engine.frontend.replicas))
        except (TimeoutError, EngineDeadError) as error:
            text = str(error) or f"no token within {HEALTH_LIMIT_S:g} s"
            return pb.HealthCheckResponse(healthy=False, message=text)
        return self._health()

    def _health(self) -> pb.HealthCheckResponse:
        """Of those that have just answered."""
        gone = [rank for rank, load in enumerate(self._engine.loads()) if load is None]
        if len(gone) == self._engine.num_replicas:
            return pb.HealthCheckResponse(healthy=False, message="the engine has stopped")
        text = f"data-parallel ranks {gone} are gone, the others generate" if gone else "the engine generates"
        return pb.HealthCheckResponse(healthy=True, message=text)

    async def _see_a_token(self, replica: LocalFrontend) -> None:
        """A probe of a full engine waits its turn; the steps of those before it are a sign of life too."""
        started_s = time.monotonic()
        probe = asyncio.create_task(self._generate_one(replica))
        try:
            while not probe.done() and replica.last_publish_s < started_s:
                await asyncio.wait([probe], timeout=HEALTH_POLL_S)
            if probe.done():
                probe.result()
        finally:
            probe.cancel()

    async def _generate_one(self, replica: LocalFrontend) -> None:
        self._probes += 1
        probe = pb.GenerateRequest(request_id=f"HEALTH_CHECK_{self._probes}")
        probe.tokenized.input_ids.append(0)
        probe.sampling_params.temperature, probe.sampling_params.max_new_tokens = 0.0, 1
        job = to_job(probe, {}, self._engine.config.admission, 1, None)
        async with aclosing(token_steps(replica, job.adds)) as steps:
            async for _ in steps:
                return

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        count = self._engine.frontend.abort_where(lambda rid: belongs_to(rid, request.request_id))
        text = f"{count} aborted" if count else f"nothing runs by the id {request.request_id!r}"
        return pb.AbortResponse(success=count > 0, message=text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return self._info.model()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return self._info.server(self.num_live)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        return self._info.loads(request.dp_rank if request.HasField("dp_rank") else None)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Tried again for a while: a request that has just been answered may still hold its blocks for a step."""
        if not math.isfinite(request.timeout_s) or request.timeout_s < 0:
            await refuse(context, 400, "invalid_value", "timeout_s", "timeout_s must be a number of seconds")
        deadline_s = time.monotonic() + max(request.timeout_s, FLUSH_GRACE_S)
        while True:
            try:
                await asyncio.to_thread(self._engine.operations.flush_cache)
                return common_pb2.FlushCacheResponse(success=True, message="the prefix cache is empty")
            except OperationError as error:
                if time.monotonic() > deadline_s:
                    return common_pb2.FlushCacheResponse(success=False, message=str(error))
            except EngineDeadError as error:
                await refuse(context, 503, "engine_dead", "", str(error))
            await asyncio.sleep(FLUSH_PAUSE_S)

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        fields = {field.name: _value(value) for field, value in request.ListFields()}
        return await self._profile(lambda: self._engine.operations.start_profile(fields), context)

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        return await self._profile(self._engine.operations.stop_profile, context)

    async def _profile(self, call: Callable[[], str], context: Context) -> common_pb2.ProfileResponse:
        try:
            return common_pb2.ProfileResponse(success=True, message=await asyncio.to_thread(call))
        except OperationError as error:
            return common_pb2.ProfileResponse(success=False, message=str(error))
        except EngineDeadError as error:
            await refuse(context, 503, "engine_dead", "", str(error))

    @cached_property
    def _tokenizer(self) -> tuple[bytes, str]:
        archive = tokenizer_archive(tokenizer_files(self._engine.tokenizer_path))
        return archive, hashlib.sha256(archive).hexdigest()

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        archive, digest = await asyncio.to_thread(lambda: self._tokenizer)
        for begin in range(0, len(archive), CHUNK_BYTES):
            is_last = begin + CHUNK_BYTES >= len(archive)
            data = archive[begin : begin + CHUNK_BYTES]
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest if is_last else "")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        log = self._engine.kv_log
        if not log.enabled:
            await refuse(context, 501, "unsupported", "", "without prefix caching there are no KV events")
        await context.send_initial_metadata(())
        start, loads_first = request.start_sequence_number, request.load_records_before_first_batch
        try:
            async with aclosing(kv_stream(log, self._info, start, loads_first)) as batches:
                async for batch in batches:
                    yield batch
        except BatchesLost as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))


class EncoderServicer(tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderServicer):
    async def Encode(self, request: encoder_pb.EncodeRequest, context: Context) -> encoder_pb.EncodeResponse:
        await refuse(context, 501, "unsupported", "", "this engine has no encoder tower")


async def _refuse_rejected(delta: Delta, context: Context) -> None:
    if delta.rejection is not None:
        found = delta.rejection
        await refuse(context, found.status, found.code, found.field, found.message)


def _value(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else list(value)
