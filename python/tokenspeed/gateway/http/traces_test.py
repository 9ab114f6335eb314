# SPDX-License-Identifier: MIT
"""Spans of the gateway, sent to a collector that is a real gRPC server; and the context on its way to the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed.gateway.testing.collector import Collector, attributes
from tokenspeed.gateway.testing.fake_engine import Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.observability.traces import OtlpTracer, valid_traceparent
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    if request.sampling_params.seed == 13:
        yield Step((), "abort", status=400, message="bad_seed: no")
    yield from replying(ids("Paris"))(request)


def test_a_span_of_every_request_hangs_under_the_callers_and_the_engine_is_told_of_it(collector: Collector) -> None:
    flags = ["--enable-trace", "--otlp-traces-endpoint", collector.address]
    with RunningGateway([script], flags) as gateway:
        assert gateway.request("POST", PATH, CHAT, {"traceparent": GIVEN, "x-request-id": "mine"})[0] == 200
        sent = gateway.engines[0].seen.requests[-1].traceparent
        assert gateway.request("POST", PATH, {**CHAT, "seed": 13})[0] == 400
        own = gateway.engines[0].seen.requests[-1].traceparent
        (service, span), (_, failed) = collector.wait(2)
    assert (service, span.name) == ("tokenspeed-gateway", f"POST {PATH}")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert sent == f"00-{TRACE}-{span.span_id.hex()}-01"
    said = attributes(span)
    assert said["tokenspeed.request_id"] == "mine" and said["gen_ai.usage.output_tokens"] == 6
    assert said["tokenspeed.time_to_first_token_s"] > 0
    assert own is not None and not failed.parent_span_id
    assert own.startswith(f"00-{failed.trace_id.hex()}-{failed.span_id.hex()}-")
    assert (failed.status.code, failed.status.message) == (2, "bad_seed")


def test_without_a_collector_the_callers_context_is_passed_on_and_nonsense_is_not() -> None:
    with RunningGateway([script]) as gateway:
        for given, passed in ((GIVEN, GIVEN), ("nonsense", None), ("00-" + "0" * 32 + f"-{PARENT}-01", None)):
            gateway.request("POST", PATH, {**CHAT, "stream": True}, {"traceparent": given})
            assert gateway.engines[0].seen.requests[-1].traceparent == passed


def test_a_collector_that_is_not_there_holds_nobody_up() -> None:
    flags = ["--enable-trace", "--otlp-traces-endpoint", "127.0.0.1:9"]
    with RunningGateway([script], flags) as gateway:
        assert gateway.post(PATH, CHAT)[0] == 200


def test_spans_of_the_past_keep_their_times(collector: Collector) -> None:
    tracer = OtlpTracer("tokenspeed-engine", collector.address)
    tracer.record("engine request", GIVEN, (100.0, 101.5), {"n": 3})
    tracer.close()
    ((service, span),) = collector.wait(1)
    assert service == "tokenspeed-engine" and span.parent_span_id.hex() == PARENT
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (100 * 10**9, 1015 * 10**8)
    assert attributes(span) == {"n": 3}


def test_what_a_context_looks_like() -> None:
    assert valid_traceparent(GIVEN) == GIVEN
    assert valid_traceparent("01" + GIVEN[2:] + "-more") is not None
    zero = f"00-{TRACE}-{'0' * 16}-01"
    for bad in (None, "", "ff" + GIVEN[2:], GIVEN.upper(), GIVEN[:-1], zero, GIVEN + "-" + "x" * 99):
        assert valid_traceparent(bad) is None
