# SPDX-License-Identifier: MIT
"""The protocols against the released ones: every field, enum value and call, and what of ours stands behind them.

testdata/released_wire.tsv restates the released package tokenspeed-smg-grpc-proto 0.4.28.post20261027 as facts, one
a line; `describe` says the same about our descriptors. Fields of ours have numbers from 1000 on.
`python protos/wire_test.py MODULE_PREFIX` prints the table for any installed stubs (for instance
smg_grpc_proto.generated), which is how the file was made.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2

STEMS = ("common", "tokenspeed_scheduler", "tokenspeed_encoder")
NONE = "-"
TABLE = Path(__file__).parent / "testdata" / "released_wire.tsv"
FieldProto = descriptor_pb2.FieldDescriptorProto

OWN_NUMBERS = 1000
"""Fields from here on, and messages that only those use, are ours."""
OWN_MESSAGES = {"tokenspeed.grpc.scheduler.PromptLogProbs", "tokenspeed.grpc.scheduler.TokenSequence"}


def load(stem: str, prefix: str = "tokenspeed_protos") -> Any:
    return importlib.import_module(f"{prefix}.{stem}_pb2")


def type_name(field: Any) -> str:
    name = FieldProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return field.type_name.lstrip(".") or name


def describe_message(path: str, message: Any) -> Iterator[tuple[str, ...]]:
    yield ("message", path, NONE, NONE, NONE, NONE)
    for field in message.field:
        label = FieldProto.Label.Name(field.label).removeprefix("LABEL_").lower()
        if field.proto3_optional:
            label = "presence"
        group = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else NONE
        yield ("field", path, str(field.number), field.name, f"{label} {type_name(field)}", group)
    for reserved in message.reserved_range:
        yield ("reserved", path, str(reserved.start), NONE, NONE, NONE)
    for nested in message.nested_type:
        yield from describe_message(f"{path}.{nested.name}", nested)


def describe(stem: str, prefix: str = "tokenspeed_protos") -> Iterator[tuple[str, ...]]:
    """Rows of (file, kind, owner, number, name, type, oneof) for everything one file declares."""
    file = descriptor_pb2.FileDescriptorProto.FromString(load(stem, prefix).DESCRIPTOR.serialized_pb)
    rows: list[tuple[str, ...]] = []
    for message in file.message_type:
        rows += describe_message(f"{file.package}.{message.name}", message)
    for enum in file.enum_type:
        rows += [("enum", f"{file.package}.{enum.name}", str(v.number), v.name, NONE, NONE) for v in enum.value]
    for service in file.service:
        for call in service.method:
            answer = ("stream " if call.server_streaming else "") + call.output_type.lstrip(".")
            asked = ("stream " if call.client_streaming else "") + call.input_type.lstrip(".")
            rows.append(("rpc", f"{file.package}.{service.name}", NONE, call.name, f"{asked} -> {answer}", NONE))
    for row in rows:
        yield (file.name, *row)


def released(file: str) -> list[tuple[str, ...]]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    rows = [tuple(line.split("\t")) for line in lines]
    return [row for row in rows if row[0] == file]


def is_own(row: tuple[str, ...]) -> bool:
    return row[2] in OWN_MESSAGES or (row[1] == "field" and int(row[3]) >= OWN_NUMBERS)


@pytest.mark.parametrize("stem", STEMS)
def test_every_field_enum_value_and_call_is_as_released(stem: str) -> None:
    expected = released(f"{stem}.proto")
    assert len(expected) > 5
    assert sorted(row for row in describe(stem) if not is_own(row)) == sorted(expected)


def test_the_table_has_all_messages_and_calls_of_the_protocol() -> None:
    rows = [row for stem in STEMS for row in released(f"{stem}.proto")]
    map_entries = {row[2] for row in rows if row[1] == "message" and row[2].endswith("Entry")}
    messages = {row[2] for row in rows if row[1] == "message"} - map_entries
    assert len(messages) == 57
    assert sum(row[1] == "rpc" for row in rows) == 12


def test_fields_of_ours_are_behind_every_released_number() -> None:
    own = {row[4] for stem in STEMS for row in describe(stem) if is_own(row) and row[2] not in OWN_MESSAGES}
    assert own >= {"prompt_logprobs", "reasoning_end", "bad_token_ids"}
    numbers = [int(row[3]) for stem in STEMS for row in released(f"{stem}.proto") if row[1] == "field"]
    assert max(numbers) < OWN_NUMBERS


def test_a_request_survives_the_wire() -> None:
    scheduler = load("tokenspeed_scheduler")
    request = scheduler.GenerateRequest(
        request_id="r",
        tokenized=scheduler.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=scheduler.SamplingParams(temperature=0.0, json_schema="{}", logit_bias={"7": -1.5}),
    )
    back = scheduler.GenerateRequest.FromString(request.SerializeToString())
    assert back == request
    # Presence of a zero is kept, and an absent field is told from a zero.
    assert back.sampling_params.HasField("temperature")
    assert not back.sampling_params.HasField("top_p")
    assert back.sampling_params.WhichOneof("constraint") == "json_schema"


def test_the_stubs_carry_a_call_and_refuse_what_is_not_served() -> None:
    scheduler = load("tokenspeed_scheduler")
    stubs = importlib.import_module("tokenspeed_protos.tokenspeed_scheduler_pb2_grpc")

    class Healthy(stubs.TokenSpeedSchedulerServicer):  # type: ignore[name-defined]
        def HealthCheck(self, request: Any, context: Any) -> Any:
            return scheduler.HealthCheckResponse(healthy=True, message="ok")

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    stubs.add_TokenSpeedSchedulerServicer_to_server(Healthy(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            client = stubs.TokenSpeedSchedulerStub(channel)
            assert client.HealthCheck(scheduler.HealthCheckRequest(), timeout=10).healthy
            with pytest.raises(grpc.RpcError) as refused:
                client.Abort(scheduler.AbortRequest(request_id="r"), timeout=10)
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    finally:
        server.stop(None)


if __name__ == "__main__":
    for name in STEMS:
        for line in describe(name, sys.argv[1]):
            print("\t".join(line))
