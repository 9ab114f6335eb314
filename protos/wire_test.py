# SPDX-License-Identifier: MIT
"""The protocols against the released ones: every field, enum value and call, and the descriptors' bytes.

testdata/released_wire.tsv restates the released package tokenspeed-smg-grpc-proto 0.4.28.post20261027 as facts, one
a line; `describe` says the same about our descriptors. `python protos/wire_test.py MODULE_PREFIX` prints the table
for any installed stubs (for instance smg_grpc_proto.generated), which is how the file was made.
"""

from __future__ import annotations

import hashlib
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

# SHA-256 of the released FileDescriptorProtos. Equal bytes let both packages be loaded into one process.
RELEASED_SHA256 = {
    "common": "df9b7e51596814866ca31c76722a647ab329fc8d21506cae6fc2299d12617263",
    "tokenspeed_scheduler": "c9580887aa7cdb71e35a56d8e6712e3b5b08ee4a4227e492973f11d593e40f64",
    "tokenspeed_encoder": "3985e0d81725960ce757d7052e5c9813e6bffe94590b943804aa83c1e712025f",
}


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


@pytest.mark.parametrize("stem", STEMS)
def test_every_field_enum_value_and_call_is_as_released(stem: str) -> None:
    expected = released(f"{stem}.proto")
    assert len(expected) > 5
    assert sorted(describe(stem)) == sorted(expected)


def test_the_table_has_all_messages_and_calls_of_the_protocol() -> None:
    rows = [row for stem in STEMS for row in released(f"{stem}.proto")]
    map_entries = {row[2] for row in rows if row[1] == "message" and row[2].endswith("Entry")}
    messages = {row[2] for row in rows if row[1] == "message"} - map_entries
    assert len(messages) == 57
    assert sum(row[1] == "rpc" for row in rows) == 12


@pytest.mark.parametrize("stem", STEMS)
def test_descriptors_are_the_released_bytes(stem: str) -> None:
    assert hashlib.sha256(load(stem).DESCRIPTOR.serialized_pb).hexdigest() == RELEASED_SHA256[stem]


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
