# SPDX-License-Identifier: MIT
"""Every field of every request of the service with values that make no sense, and bytes that are no message: a call
answers, or refuses with INVALID_ARGUMENT and the field's name; nothing is UNKNOWN, and the next call works."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tokenspeed.rpc.grpc.serve.conftest import Served
from tokenspeed.rpc.grpc.serve.info import EngineInfo
from tokenspeed_protos import common_pb2
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb

_VALUES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_FLOAT: [math.nan, math.inf, -1.0, 0.0, 1e30, -1e30, 1e-30],
    FieldDescriptor.TYPE_INT32: [-1, -2, -(2**31), 2**31 - 1, 0, 5],
    FieldDescriptor.TYPE_SINT32: [-(2**31), 2**31 - 1, 0],
    FieldDescriptor.TYPE_UINT32: [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 49152],
    FieldDescriptor.TYPE_INT64: [-1, -(2**63), 2**63 - 1],
    FieldDescriptor.TYPE_UINT64: [0, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_BOOL: [True],
    FieldDescriptor.TYPE_ENUM: [99, -5, 1],
    FieldDescriptor.TYPE_BYTES: [b"\xff\xfe"],
    FieldDescriptor.TYPE_STRING: ["", "x", "\0", "(" * 5000, "{", "\U0001f600" * 300],
}
_FREE = {"original_text", "cache_salt"}
"""Texts that may be anything."""
_numbers = itertools.count()


def asked(**params: Any) -> pb.GenerateRequest:
    params = {"max_new_tokens": 2, "temperature": 0.0} | params
    return pb.GenerateRequest(
        request_id=f"garbage-{next(_numbers)}",
        tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=pb.SamplingParams(**params),
        return_logprob=True,
    )


def mutations(
    descriptor: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Callable[[Message], None]]]:
    """(the field's path, a value, who sets it in a message) of every scalar field below."""
    for field in descriptor.fields:
        here = (*path, field.name)
        if field.message_type is None:
            for value in _VALUES[field.type]:
                yield here, value, _setter(field, value)
        elif not field.message_type.GetOptions().map_entry and field.message_type.file.package != "google.protobuf":
            for deeper, value, put in mutations(field.message_type, here):
                yield deeper, value, _descending(field, put)


def _setter(field: FieldDescriptor, value: Any) -> Callable[[Message], None]:
    def put(message: Message) -> None:
        if field.is_repeated:
            getattr(message, field.name).extend([value] * 3)
        else:
            setattr(message, field.name, value)

    return put


def _descending(field: FieldDescriptor, put: Callable[[Message], None]) -> Callable[[Message], None]:
    return lambda message: put(
        getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name)
    )


def refusal(served: Served, request: pb.GenerateRequest) -> tuple[str, str] | None:
    """(status, field) of a call that is refused; None of one that begins to answer."""
    call = served.stub.Generate(request, timeout=60)
    try:
        next(call)
    except grpc.RpcError as error:
        details = dict(error.trailing_metadata() or ())
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, (request, error)
        assert error.details().startswith(f"{details['tokenspeed-error-code']}: ")
        return error.code().name, str(details["tokenspeed-error-field"])
    call.cancel()
    return None


def works(served: Served) -> bool:
    return [r.complete.finish_reason for r in served.stub.Generate(asked(), timeout=60)][-1] == "length"


def test_no_value_of_any_field_is_answered_otherwise_than_by_its_name(served: Served) -> None:
    told = set()
    for path, value, put in mutations(pb.GenerateRequest.DESCRIPTOR):
        request = asked()
        put(request)
        found = refusal(served, request)
        if path[-1] in _FREE:
            assert found is None, path
        elif found is not None:
            # A length that the context has no room for is told of the prompt.
            names = {*path, "input_ids"} if path[-1] == "max_new_tokens" else set(path)
            assert found[1] in names, (path, value, found)
            told.add(path[:2])
    assert len(told) > 30  # nearly every field has a value that it refuses
    assert works(served)


@pytest.mark.parametrize(
    ("field", "change"),
    [("logit_bias", {"logit_bias": {key: 1.0}}) for key in ("-1", "", " 7", "1_0", "07", "\u0663", "1.5", "9" * 5000)]
    + [
        ("logit_bias", {"logit_bias": {"1": math.nan}}),
        ("logit_bias", {"logit_bias": {str(token): 1.0 for token in range(2000)}}),
        ("custom_params", {"custom_params": {"scale": math.nan}}),
        ("bad_token_ids", {"bad_token_ids": [pb.TokenSequence()]}),
    ],
)
def test_maps_and_lists_are_checked_too(served: Served, field: str, change: dict[str, Any]) -> None:
    assert refusal(served, asked(**change)) == ("INVALID_ARGUMENT", field)


def test_a_request_without_ids_is_refused_whatever_its_text(served: Served) -> None:
    for tokenized in ({}, {"tokenized": pb.TokenizedInput(original_text="hello")}):
        request = pb.GenerateRequest(request_id="none", **tokenized)
        assert refusal(served, request) == ("INVALID_ARGUMENT", "input_ids")
    request = asked()
    request.request_id = "x" * 100_000
    assert refusal(served, request) == ("INVALID_ARGUMENT", "request_id")


def test_an_id_that_does_not_fit_is_told_as_it_was_sent(served: Served) -> None:
    request = asked()
    request.tokenized.input_ids.append(2**32 - 1)
    with pytest.raises(grpc.RpcError) as refused:
        next(served.stub.Generate(request))
    assert str(2**32 - 1) in refused.value.details()


def test_bytes_that_are_no_message_are_refused_and_never_unknown(served: Served) -> None:
    def as_sent(payload: bytes) -> bytes:
        return payload

    service = "/tokenspeed.grpc.scheduler.TokenSpeedScheduler"
    generate = served.channel.unary_stream(f"{service}/Generate", as_sent, as_sent)
    loads = served.channel.unary_unary(f"{service}/GetLoads", as_sent, as_sent)
    rng, refused = random.Random(1), 0
    for _ in range(60):
        payload = bytearray(asked().SerializeToString())
        for _ in range(rng.randint(1, 4)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        call = generate(bytes(payload), timeout=60)
        try:
            next(call)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
            refused += 1
        call.cancel()
    assert refused > 20
    with pytest.raises(grpc.RpcError) as unreadable:
        loads(b"\xff\xff\xff", timeout=60)
    assert unreadable.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be read" in unreadable.value.details()
    assert works(served)


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("GetLoads", pb.GetLoadsRequest),
        ("Abort", pb.AbortRequest),
        ("FlushCache", common_pb2.FlushCacheRequest),
        ("StartProfile", common_pb2.StartProfileRequest),
    ],
)
def test_the_other_calls_answer_or_refuse(served: Served, method: str, request_type: Any) -> None:
    for path, value, put in mutations(request_type.DESCRIPTOR):
        if (path, value) == (("timeout_s",), 1e30) or (path == ("output_dir",) and value != "\0"):
            continue  # a flush may wait that long, and a folder of any name can be made
        request = request_type()
        put(request)
        try:
            getattr(served.stub, method)(request, timeout=60)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, (path, value, error)
            assert dict(error.trailing_metadata())["tokenspeed-error-field"] == path[-1]
    assert works(served)


def test_a_fault_of_our_own_is_internal_and_tells_no_traceback(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_info: EngineInfo, _rank: int | None) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(EngineInfo, "loads", fail)
    with pytest.raises(grpc.RpcError) as failed:
        served.stub.GetLoads(pb.GetLoadsRequest(), timeout=60)
    assert failed.value.code() == grpc.StatusCode.INTERNAL
    assert failed.value.details() == "internal_error: the server failed at it (KeyError)"
