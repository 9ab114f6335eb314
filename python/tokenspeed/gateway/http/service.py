# SPDX-License-Identifier: MIT
"""Runs generation requests between HTTP and the workers: admission, job, attempts, answer, metrics.

One `Service` a process, on the loop's thread. A request passes here in order: place (429 when there is none), check
of the body (400), worker (503), attempts under the retry policy, answer. Whatever ends it, a client that leaves
included, its open choices are aborted on the engine and its place is given back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from aiohttp import web

from tokenspeed.gateway.chat.answer import Answer
from tokenspeed.gateway.chat.job import Job
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.chat.turns import Turns
from tokenspeed.gateway.http.admission import Admission
from tokenspeed.gateway.http.body import read_body
from tokenspeed.gateway.http.errors import ApiError, invalid
from tokenspeed.gateway.http.gauges import WorkerGauges
from tokenspeed.gateway.http.sse import EventStream, KeepAlive
from tokenspeed.gateway.route.breaker import is_fault
from tokenspeed.gateway.route.generation import Generation
from tokenspeed.gateway.route.policy import Asked
from tokenspeed.gateway.route.retry import RetryHooks, RetryPolicy, with_retries
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.route.worker import Worker
from tokenspeed.observability.gateway_metrics import GatewayMetrics, RequestTimes, RouteLabels
from tokenspeed.observability.traces import PassingOn, Span, Tracer

logger = logging.getLogger(__name__)

_ROUTING_KEY = "x-smg-routing-key"
_TARGET = "x-smg-target-worker"

MakeJob = Callable[[bytes, ServedModel, str], Awaitable[Job]]


class Service:
    """Everything that a generation request needs."""

    def __init__(
        self,
        model: ServedModel,
        router: Router,
        admission: Admission,
        retry: RetryPolicy,
        keep_alive: KeepAlive,
        metrics: GatewayMetrics,
        timeout_s: float,
    ) -> None:
        self.model = model
        self.router = router
        self.admission = admission
        self.keep_alive = keep_alive
        self.metrics = metrics
        self.gauges = WorkerGauges(model, router, metrics)
        self.stopping = False
        """A shutdown has begun: readiness says so."""
        self.draining = False
        """New requests are refused; those in flight go on."""
        self.num_open = 0
        """Requests that have not had their last byte."""
        self.retry = retry
        self.tracer: Tracer = PassingOn()
        self._turns = Turns()
        self.timeout_s = timeout_s
        """Longest life of a request, from the check of its body to its last byte."""

        self._rejections_told = 0
        self.key_headers: tuple[str, ...] = (_ROUTING_KEY,)
        """Where a request's routing key is looked for, in this order."""
        self.totals: Callable[[], Awaitable[bytes]] | None = None
        """Where there are several gateway processes: the text of /metrics of all of them."""
        self.others_ready: Callable[[], Awaitable[bool]] | None = None
        """Where there are several: whether the others have workers too."""
        self.stop_elsewhere: Callable[[str], Awaitable[None]] | None = None
        """Where there are several: ends a background response that runs in another one."""

    def own_metrics(self) -> bytes:
        """The text of /metrics of this process."""
        self.gauges.refresh()
        places = self.admission
        self.metrics.admission(places.num_admitted, places.num_waiting, places.num_rejected - self._rejections_told)
        self._rejections_told = places.num_rejected
        return self.metrics.render()

    async def handle(self, request: web.Request, request_id: str, make_job: MakeJob) -> web.StreamResponse:
        """Answer a request. Raises `ApiError` while nothing has been sent."""
        if self.draining:
            raise ApiError(503, "draining", "this server is shutting down", None, 1)
        span = self.tracer.begin(f"{request.method} {request.path}", request.headers.get("traceparent"))
        with self._arrival(request_id, span) as arrival:
            body = await read_body(request)  # before a place is taken: clients may be slow
            return await self._admitted(request, body, make_job, arrival)

    async def run(self, job: Job) -> None:
        """Run a job whose answer nobody waits for; its format keeps it. Raises `ApiError`."""
        with self._arrival(job.request_id, self.tracer.begin("background response", None)) as arrival:
            async with self.admission, self._counted(job, Asked(job.prompts[0], ""), arrival) as run:
                await run.whole()

    @contextmanager
    def _arrival(self, request_id: str, span: Span) -> Iterator[_Arrival]:
        """A request that is open, with its span around it."""
        arrival = _Arrival(request_id, span, time.monotonic(), {"tokenspeed.request_id": request_id})
        self.num_open += 1
        try:
            yield arrival
        except ApiError as error:
            arrival.error = error.code
            raise
        except asyncio.CancelledError:
            arrival.error = "client_closed_request"
            raise
        finally:
            self.num_open -= 1
            span.end(arrival.attributes, arrival.error)

    async def _admitted(
        self, request: web.Request, body: bytes, make_job: MakeJob, arrival: _Arrival
    ) -> web.StreamResponse:
        async with self.admission:
            job = await make_job(body, self.model, secrets.token_hex(12))
            asked = Asked(job.prompts[0], self._routing_key(request), request.headers.get(_TARGET, ""))
            async with self._counted(job, asked, arrival) as run:
                if job.stream:
                    return await run.stream(EventStream(request, {"x-request-id": arrival.request_id}))
                return await run.whole()

    def _routing_key(self, request: web.Request) -> str:
        """That of the first header that has one."""
        return next((key for name in self.key_headers if (key := request.headers.get(name))), "")

    @asynccontextmanager
    async def _counted(self, job: Job, asked: Asked, arrival: _Arrival) -> AsyncIterator[_Run]:
        """A run of `job`, with its metrics around it."""
        route = RouteLabels(self.model.name, job.endpoint, self.router.connection_mode)
        self.metrics.route_started(route, job.stream)
        run = _Run(self, job, asked, route, arrival)
        if job.turn is not None:
            difference = self._turns.difference(job.turn, job.prompts[0])
            if difference is not None:
                self.metrics.turn_went_on(difference.position if difference.diverges else None, difference.num_before)
        try:
            yield run
        except ApiError as error:
            self.metrics.route_failed(route, error.type, error.code)
            raise
        else:
            if job.turn is not None:
                self._turns.remember(job.turn, job.prompts[0], run.token_ids)
        finally:
            run.count()

    def attempt(self, run: _Run, number: int) -> Generation:
        """A fresh generation on the worker that the policy chooses. Raises `ApiError` 503 without one."""
        worker, branch = self.router.pick(run.asked, run.tried)
        self.metrics.worker_requested(worker.url)
        self.metrics.worker_selected(worker.connection_mode, self.model.name, self.router.policy.name, branch)
        engine = worker.lane.ready_response
        for column in run.job.handling.columns:
            if not engine.declares("TokenizedGenerateReqInput", column):
                raise invalid(column, "unsupported_parameter", f"{column}: the engine behind this server lacks it")
        traced = engine.declares("TokenizedGenerateReqInput", "traceparent")
        traceparent = run.arrival.span.traceparent if traced else None
        return Generation(worker, run.job.requests(number, engine.max_model_len, traceparent))

    @contextmanager
    def judged(self, worker: Worker) -> Iterator[None]:
        """What happens inside speaks for or against `worker`: an answer, or a fault of its own. Neither does a client
        that leaves, a refusal, or a worker that is busy."""
        trial = worker.breaker.begin()
        try:
            yield
        except ApiError as error:
            if is_fault(error):
                worker.breaker.failed()
                self.metrics.worker_failed(worker.url, error.code)
                self.metrics.breaker_outcome(worker.url, False)
            raise
        finally:
            worker.breaker.end(trial)
        worker.breaker.succeeded()
        self.metrics.breaker_outcome(worker.url, True)

    def retry_hooks(self, job: Job, answered: Callable[[], bool]) -> RetryHooks:
        """What a retry loop of `job` asks and tells."""
        return RetryHooks(
            answered=answered,
            on_retry=lambda: self.metrics.worker_retried(job.endpoint),
            on_exhausted=lambda: self.metrics.worker_retries_exhausted(job.endpoint),
        )


@dataclass
class _Arrival:
    """A request from its head to its last byte. `error`: the code of what went wrong."""

    request_id: str
    span: Span
    at_s: float
    attributes: dict[str, str | int | float | bool]
    error: str | None = None


class _Run:
    """One request on its way through its attempts."""

    def __init__(self, service: Service, job: Job, asked: Asked, route: RouteLabels, arrival: _Arrival) -> None:
        self.job = job
        self.arrival = arrival
        self.asked = asked
        self.tried: list[str] = []
        """URLs of the workers that attempts went to."""
        self._service = service
        self._route = route
        self._attempts = 0
        self._answer = Answer(job, service.model.tokenizer.vocabulary)

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the answer, of a conversation's turn."""
        return self._answer.token_ids

    async def whole(self) -> web.Response:
        """The answer in one body."""

        async def attempt() -> bytes:
            generation = self._next()
            with self._service.judged(generation.worker):
                return await self._answer.whole(generation)

        hooks = self._service.retry_hooks(self.job, lambda: False)
        try:
            async with asyncio.timeout(self._service.timeout_s):
                body = await with_retries(self._service.retry, hooks, attempt)
        except TimeoutError:
            raise _timed_out() from None
        headers = {"x-request-id": self.arrival.request_id}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def stream(self, events: EventStream) -> web.StreamResponse:
        """The answer as events; an error after the first of them becomes an event itself."""

        async def attempt() -> None:
            generation = self._next()
            with self._service.judged(generation.worker):
                await self._answer.stream(generation, events.write)

        hooks = self._service.retry_hooks(self.job, lambda: events.answered)
        self._service.keep_alive.add(events)
        try:
            try:
                async with asyncio.timeout(self._service.timeout_s):
                    await with_retries(self._service.retry, hooks, attempt)
            except TimeoutError:
                await self._say(events, _timed_out())
            except ApiError as error:
                await self._say(events, error)
            await events.finish()
        except ConnectionError:
            # The client has left; leaving the generation has told the engine.
            logger.debug("%s: the client left", self.job.request_id)
        finally:
            self._service.keep_alive.discard(events)
        return events.response

    async def _say(self, events: EventStream, error: ApiError) -> None:
        """An error on a stream: an event once the head is out, else an answer of its own."""
        if not events.started:
            raise error
        self.arrival.error = error.code
        self._service.metrics.route_failed(self._route, error.type, error.code)
        await events.write(self.job.format.failure(error))

    def count(self) -> None:
        """Record what the request used, whatever its end."""
        now_s = time.monotonic()
        usage, first_s = self._answer.count(), self._answer.first_token_s
        times = RequestTimes(
            total_s=now_s - self.arrival.at_s,
            first_token_s=None if first_s is None else first_s - self.arrival.at_s,
            num_output_tokens=usage.completion_tokens,
        )
        metrics = self._service.metrics
        metrics.route_finished(self._route, times)
        self.arrival.attributes |= {
            "gen_ai.request.model": self._route.model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "tokenspeed.cached_tokens": usage.cached_tokens,
            "tokenspeed.attempts": self._attempts,
        }
        if times.first_token_s is not None:
            self.arrival.attributes["tokenspeed.time_to_first_token_s"] = times.first_token_s
        metrics.tokens(self._route, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def _next(self) -> Generation:
        self._attempts += 1
        if self._attempts > 1:
            self._answer = Answer(self.job, self._service.model.tokenizer.vocabulary)
        generation = self._service.attempt(self, self._attempts)
        self.tried.append(generation.worker.url)
        return generation


def _timed_out() -> ApiError:
    return ApiError(504, "request_timeout", "the request took too long")
