# SPDX-License-Identifier: MIT
"""A collector of spans for tests: a real gRPC server of OTLP. For tests only."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps (service, span) of everything that it was sent."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        """The protocol's call."""
        for group in request.resource_spans:
            names = [a.value.string_value for a in group.resource.attributes if a.key == "service.name"]
            self.spans += [(names[0], span) for scope in group.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, count: int) -> list[tuple[str, Any]]:
        """So many spans, or more."""
        deadline = time.monotonic() + 20
        while len(self.spans) < count:
            assert time.monotonic() < deadline, "the spans did not come"
            time.sleep(0.02)
        return self.spans

    def stop(self) -> None:
        """End the server."""
        self._server.stop(0).wait()


def attributes(span: Any) -> dict[str, Any]:
    """What a span says."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
