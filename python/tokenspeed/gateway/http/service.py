# SPDX-License-Identifier: MIT
"""Runs generation requests between HTTP and the workers: admission, job, attempts, answer, metrics.

One `Service` a process, on the loop's thread. A request passes here in order: place (429 when there is none), check
of the body (400), worker (503), attempts under the retry policy, answer. Whatever ends it, a client that leaves
included, its open choices are aborted on the engine and its place is given back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

from aiohttp import web

from tokenspeed.gateway.chat.answer import Answer
from tokenspeed.gateway.chat.format import Usage
from tokenspeed.gateway.chat.job import Job
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.chat.turns import Turns
from tokenspeed.gateway.http.admission import Admission
from tokenspeed.gateway.http.body import read_body
from tokenspeed.gateway.http.errors import ApiError, invalid
from tokenspeed.gateway.http.gauges import WorkerGauges
from tokenspeed.gateway.http.priorities import Place, PriorityAdmission
from tokenspeed.gateway.http.request_ids import new_id
from tokenspeed.gateway.http.sse import EventStream, KeepAlive
from tokenspeed.gateway.http.timeouts import TimeLimit, Timeouts
from tokenspeed.gateway.route.breaker import is_fault
from tokenspeed.gateway.route.generation import Generation
from tokenspeed.gateway.route.policy import Asked
from tokenspeed.gateway.route.retry import RetryPolicy, with_retries
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.route.worker import Worker
from tokenspeed.observability.gateway_metrics import GatewayMetrics, RequestTimes, RouteLabels
from tokenspeed.observability.traces import PassingOn, Span, Tracer

logger = logging.getLogger(__name__)

_ROUTING_KEY = "x-smg-routing-key"
_TARGET = "x-smg-target-worker"
_PRIORITY = "x-smg-priority"
_ROUTED = "x-smg-routed-worker-id"
ROUTED = web.RequestKey("routed", str)
"""URL of the worker that a request went to last."""

MakeJob = Callable[[bytes, ServedModel, str], Awaitable[Job]]


class Service:
    """Everything that a generation request needs."""

    def __init__(
        self,
        model: ServedModel,
        router: Router,
        admission: Admission | PriorityAdmission,
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
        self.turns = Turns()
        """Of conversations."""
        self.timeouts = Timeouts(timeout_s)
        """Of requests, from the check of their body to their last byte."""
        self._admissions_told = (0, 0)
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
        places.show()
        allowed, rejected = self._admissions_told
        self._admissions_told = (places.num_let_in, places.num_rejected)
        self.metrics.admission(places.num_admitted, places.num_waiting, places.num_rejected - rejected)
        self.metrics.rate_limited(places.num_let_in - allowed, places.num_rejected - rejected)
        if self.model.cache is not None:
            self.metrics.tokenizer_evicted(self.model.cache.num_evicted)
        return self.metrics.render()

    async def handle(self, request: web.Request, request_id: str, make_job: MakeJob) -> web.StreamResponse:
        """Answer a request. Raises `ApiError` while nothing has been sent."""
        if self.draining:
            raise ApiError(503, "draining", "this server is shutting down", None, 1)
        span = self.tracer.begin(f"{request.method} {request.path}", request.headers.get("traceparent"))
        with _Arrival(self, request_id, span) as arrival:
            body = await read_body(request)  # before a place is taken: clients may be slow
            place = self.admission.place(request.headers.get(_PRIORITY))
            async with place:
                job = await make_job(body, self.model, new_id(24))
                asked = Asked(job.prompts[0], self._routing_key(request), request.headers.get(_TARGET, ""))
                with _Run(self, job, asked, arrival) as run:
                    if isinstance(place, Place):
                        place.begun = run.has_begun
                    try:
                        if job.stream:
                            return await run.stream(EventStream(request, {"x-request-id": request_id}))
                        return await run.whole()
                    finally:
                        if run.tried:
                            request[ROUTED] = run.tried[-1]

    async def run(self, job: Job) -> None:
        """Run a job whose answer nobody waits for; its format keeps it. Raises `ApiError`."""
        with _Arrival(self, job.request_id, self.tracer.begin("background response", None)) as arrival:
            async with self.admission.place(None):
                with _Run(self, job, Asked(job.prompts[0], ""), arrival) as run:
                    await run.whole()

    def _routing_key(self, request: web.Request) -> str:
        """That of the first header that has one."""
        for name in self.key_headers:
            key = request.headers.get(name)
            if key:
                return key
        return ""

    async def attempt(self, run: _Run, number: int) -> Generation:
        """A fresh generation on the worker that the policy chooses. Raises `ApiError` 503 without one."""
        choice = await self.router.place(run.asked, run.tried)
        if run.asked.routing_key and number == 1:
            self.metrics.workers.keyed()
        worker = choice.worker
        self.metrics.workers.requested(worker.url, self.model.name)
        self.metrics.workers.selected(worker.connection_mode, self.model.name, self.router.policy.name, choice.branch)
        if choice.overlap is not None:
            self.metrics.workers.cache_matched(choice.overlap)
        engine = worker.lane.ready_response
        for column in run.job.handling.columns:
            if not engine.declares("TokenizedGenerateReqInput", column):
                raise invalid(column, "unsupported_parameter", f"{column}: the engine behind this server lacks it")
        traceparent = run.arrival.span.traceparent
        if traceparent is not None and not engine.declares("TokenizedGenerateReqInput", "traceparent"):
            traceparent = None
        num_tokens = sum(map(len, run.job.prompts)) - choice.credit
        return Generation(worker, run.job.requests(number, engine.max_model_len, traceparent), num_tokens)


class _Arrival:
    """A context manager: a request that is open, from its head to its last byte, with its span around it. `error`: the
    code of what went wrong."""

    def __init__(self, service: Service, request_id: str, span: Span) -> None:
        self.request_id, self.span = request_id, span
        self.at_s = time.monotonic()
        self.attributes: dict[str, str | int | float | bool] = {"tokenspeed.request_id": request_id}
        self.error: str | None = None
        self._service = service

    def __enter__(self) -> _Arrival:
        self._service.num_open += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ApiError):
            self.error = error.code
        elif isinstance(error, asyncio.CancelledError):
            self.error = "client_closed_request"
        self._service.num_open -= 1
        self.span.end(self.attributes, self.error)


class _Judged:
    """A context manager: what happens inside speaks for or against `worker`: an answer, or a fault of its own. Neither
    does a client that leaves, a refusal, or a worker that is busy."""

    def __init__(self, worker: Worker, metrics: GatewayMetrics) -> None:
        self._worker, self._metrics = worker, metrics

    def __enter__(self) -> None:
        self._trial = self._worker.breaker.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        worker, metrics = self._worker, self._metrics
        if isinstance(error, ApiError) and is_fault(error):
            worker.breaker.failed()
            metrics.workers.failed(worker.url, error.code)
            metrics.workers.breaker_outcome(worker.url, False)
        worker.breaker.end(self._trial)
        if error is None:
            worker.breaker.succeeded()
            metrics.workers.breaker_outcome(worker.url, True)


class _Run:
    """One request on its way through its attempts; a context manager with the metrics around it."""

    def __init__(self, service: Service, job: Job, asked: Asked, arrival: _Arrival) -> None:
        self.job = job
        self.arrival = arrival
        self.asked = asked
        self.tried: list[str] = []
        """URLs of the workers that attempts went to."""
        self._worker_id = ""
        """Of the last of them."""
        self._service = service
        self._route = RouteLabels(service.model.name, job.endpoint, service.router.connection_mode)
        self._attempts = 0
        self._answer = Answer(job, service.model.tokenizer.vocabulary)
        self._events: EventStream | None = None

    def __enter__(self) -> _Run:
        job, metrics = self.job, self._service.metrics
        metrics.route_started(self._route, job.stream)
        if job.turn is not None:
            difference = self._service.turns.difference(job.turn, job.prompts[0])
            if difference is not None:
                metrics.turn_went_on(difference.position if difference.diverges else None, difference.num_before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ApiError):
            self._service.metrics.route_failed(self._route, error.type, error.code)
        elif error is None and self.job.turn is not None:
            self._service.turns.remember(self.job.turn, self.job.prompts[0], self._answer.token_ids)
        self._count()

    @property
    def answered(self) -> bool:
        """Whether the client has got something."""
        return self._events is not None and self._events.answered

    def has_begun(self) -> bool:
        """Whether the head of the answer is out."""
        return self._events is not None and self._events.started

    def on_retry(self, attempt: int, pause_s: float) -> None:
        """An attempt failed, and another one comes."""
        self._service.metrics.workers.retried(self.job.endpoint, attempt, pause_s)

    def on_exhausted(self) -> None:
        """The last allowed attempt failed."""
        self._service.metrics.workers.retries_exhausted(self.job.endpoint)

    async def whole(self) -> web.Response:
        """The answer in one body."""
        service = self._service

        async def attempt() -> bytes:
            generation = await self._next()
            with _Judged(generation.worker, service.metrics):
                return await self._answer.whole(generation)

        try:
            with TimeLimit(service.timeouts):
                body = await with_retries(service.retry, self, attempt)
        except TimeoutError:
            raise _timed_out() from None
        headers = {_ROUTED: self._worker_id}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def stream(self, events: EventStream) -> web.StreamResponse:
        """The answer as events; an error after the first of them becomes an event itself."""
        service, self._events = self._service, events

        async def attempt() -> bytes:
            generation = await self._next()
            if not events.started:
                events.response.headers[_ROUTED] = self._worker_id
            with _Judged(generation.worker, service.metrics):
                return await self._answer.stream(generation, events.write)

        service.keep_alive.add(events)
        try:
            try:
                with TimeLimit(service.timeouts):
                    last = await with_retries(service.retry, self, attempt)
            except TimeoutError:
                last = self._failure(events, _timed_out())
            except ApiError as error:
                last = self._failure(events, error)
            await events.finish(last)
        except ConnectionError:
            # The client has left; leaving the generation has told the engine.
            logger.debug("%s: the client left", self.job.request_id)
        finally:
            service.keep_alive.discard(events)
        return events.response

    def _failure(self, events: EventStream, error: ApiError) -> bytes:
        """An error on a stream: an event once the head is out, else an answer of its own."""
        if not events.started:
            raise error
        self.arrival.error = error.code
        self._service.metrics.route_failed(self._route, error.type, error.code)
        return self.job.format.failure(error)

    def _count(self) -> None:
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
        metrics.tokens(self._route, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        if self._answer.stopped_here:
            metrics.stopped_here(self._route, self._answer.num_tail_tokens)
        if self.arrival.span.records:
            self._describe(usage, times)

    def _describe(self, usage: Usage, times: RequestTimes) -> None:
        """The course of the request, for its span."""
        self.arrival.attributes |= {
            "gen_ai.request.model": self._route.model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "tokenspeed.cached_tokens": usage.cached_tokens,
            "tokenspeed.attempts": self._attempts,
        }
        if times.first_token_s is not None:
            self.arrival.attributes["tokenspeed.time_to_first_token_s"] = times.first_token_s

    async def _next(self) -> Generation:
        self._attempts += 1
        if self._attempts > 1:
            self._answer = Answer(self.job, self._service.model.tokenizer.vocabulary)
        generation = await self._service.attempt(self, self._attempts)
        self.tried.append(generation.worker.url)
        self._worker_id = generation.worker.id
        return generation


def _timed_out() -> ApiError:
    return ApiError(504, "request_timeout", "the request took too long")
