# SPDX-License-Identifier: MIT
"""Spans for OTLP collectors: one of every request at the gateway, one of every choice at the engine, in one trace.

The context travels in W3C's form, `traceparent`. A gateway without a collector passes on what the caller sent, so that
an engine with one still joins the caller's trace. Made of the OpenTelemetry SDK, which is loaded only when a collector
is named; a thread of it sends in batches, and drops what a dead collector does not take.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

Attributes = Mapping[str, str | int | float | bool]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class TracesUnavailable(Exception):
    """The OpenTelemetry packages are not installed."""


def valid_traceparent(given: str | None) -> str | None:
    """What W3C's recommendation takes for a context; None for anything else, which is to be ignored."""
    return given if given is not None and len(given) <= 128 and _TRACEPARENT.fullmatch(given) else None


class Span(Protocol):
    """Something that takes time. `traceparent` is the context of its children; None where there is none. `records`:
    whether anybody reads its attributes."""

    records: bool

    @property
    def traceparent(self) -> str | None: ...

    def end(self, attributes: Attributes, error: str | None) -> None:
        """It is over; `error` says what went wrong."""


class Tracer(Protocol):
    """Makes spans."""

    def begin(self, name: str, traceparent: str | None) -> Span:
        """A span that begins now, under the caller's."""

    def record(self, name: str, traceparent: str | None, times_ts: tuple[float, float], attributes: Attributes) -> None:
        """A span that is over already; (begin, end) in seconds since the epoch."""

    def close(self) -> None:
        """Send what is left."""


class PassingOn:
    """No collector: spans are nothing, and children hang under the caller's own."""

    def begin(self, name: str, traceparent: str | None) -> Span:
        return _Passed(valid_traceparent(traceparent))

    def record(self, name: str, traceparent: str | None, times_ts: tuple[float, float], attributes: Attributes) -> None:
        return None

    def close(self) -> None:
        return None


class _Passed:
    records = False

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent

    def end(self, attributes: Attributes, error: str | None) -> None:
        return None


class OtlpTracer:
    """Sends to `endpoint` (host:port, gRPC without TLS). service: the process, for the collector. Raises
    `TracesUnavailable`."""

    def __init__(self, service: str, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracesUnavailable(f"traces need opentelemetry-sdk and its OTLP exporter: {error}") from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("tokenspeed")
        self._context = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = lambda text: Status(StatusCode.ERROR, text)

    def begin(self, name: str, traceparent: str | None) -> Span:
        return _OtlpSpan(self._start(name, traceparent, None), self._context.inject, self._failed)

    def record(self, name: str, traceparent: str | None, times_ts: tuple[float, float], attributes: Attributes) -> None:
        begin_ns, end_ns = (int(ts * 1e9) for ts in times_ts)
        span = self._start(name, traceparent, begin_ns)
        span.set_attributes(dict(attributes))
        span.end(end_ns)

    def close(self) -> None:
        self._provider.shutdown()

    def _start(self, name: str, traceparent: str | None, begin_ns: int | None) -> Any:
        parent = valid_traceparent(traceparent)
        context = None if parent is None else self._context.extract({"traceparent": parent})
        return self._tracer.start_span(name, context, self._kind, start_time=begin_ns)


class _OtlpSpan:
    records = True

    def __init__(self, span: Any, inject: Any, failed: Any) -> None:
        self._span, self._inject, self._failed = span, inject, failed

    @property
    def traceparent(self) -> str | None:
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._inject(carrier, set_span_in_context(self._span))
        return carrier.get("traceparent")

    def end(self, attributes: Attributes, error: str | None) -> None:
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(self._failed(error))
        self._span.end()


def make_tracer(service: str, endpoint: str | None) -> Tracer:
    """endpoint: None for no collector. Raises `TracesUnavailable`."""
    return PassingOn() if endpoint is None else OtlpTracer(service, endpoint)
