# SPDX-License-Identifier: MIT
"""The bytes of the lane, pinned: a change here breaks every peer that is already deployed."""

import msgspec
import pytest

from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.testing import ADD

SAMPLING_HEX = (
    "dc001d10c09102cb3fe0000000000000cb3ff0000000000000ce40000000cb0000000000000000cb0000000000000000"
    "cb0000000000000000cb3ff000000000000000c0c0c0c0c2c3c3c2c0c0c0c007c0019000c3"
)
ADD_HEX = (
    "9bb9546f6b656e697a656447656e6572617465526571496e707574a3722d31c0c09301cd012cce00011170"
    + SAMPLING_HEX
    + "c3ff02c0c3"
)
BATCH = wire.BatchTokenIDOutSlim(["r-1"], [[5, 6]], ["length"], [3], [2], [0], [[-0.5, -1.0]], [[5, 6]], 1, 2, 3, 4, 5)
BATCH_PREFIX_HEX = (
    "b34261746368546f6b656e49444f7574536c696d91a3722d3191920506"
    "91a66c656e6774689103910291009192cbbfe0000000000000cbbff0000000000000919205060102030405"
)


def test_a_request_has_the_pinned_bytes_and_comes_back_whole() -> None:
    frames = wire.encode_request(ADD)
    assert frames[0] == b"\x00"
    assert frames[1].hex() == ADD_HEX
    message = wire.decode_engine_message(frames)
    assert isinstance(message, wire.AddRequest)
    read, sent = msgspec.structs.asdict(message.request), msgspec.structs.asdict(ADD)
    params, plain = read.pop("sampling_params"), sent.pop("sampling_params")
    assert read | sent == read
    assert msgspec.structs.asdict(params) | msgspec.structs.asdict(plain) == msgspec.structs.asdict(params)
    assert message.aux == []


def test_sampling_columns_of_ours_stand_behind_those_that_every_peer_knows() -> None:
    plain = {name: getattr(ADD.sampling_params, name) for name in ADD.sampling_params.__struct_fields__}
    more = wire.MoreSamplingParamsWire(**plain, allowed_token_ids=[5], bad_token_ids=[[1, 2]], reasoning_end="</t>")
    array = msgspec.msgpack.decode(wire.encode(more))
    assert array[:29] == msgspec.msgpack.decode(wire.encode(ADD.sampling_params)) and len(array) == 32
    frames = wire.encode_request(msgspec.structs.replace(ADD, sampling_params=more))
    message = wire.decode_engine_message(frames)
    assert isinstance(message, wire.AddRequest) and message.request.sampling_params == more


def test_an_abort_has_the_pinned_bytes() -> None:
    assert [f.hex() for f in wire.encode_abort(["a", "b"])] == ["01", "92a161a162"]
    assert wire.decode_engine_message([b"\x01", bytes.fromhex("92a161a162")]) == wire.AbortRequests(["a", "b"])
    assert wire.encode_end(["a", "b"])[:2] == wire.encode_abort(["a", "b"])
    assert wire.decode_engine_message(wire.encode_end(["a", "b"])) == wire.EndRequests(["a", "b"])


def test_a_control_call_and_its_reply_have_the_pinned_bytes() -> None:
    frames = wire.encode_control(wire.ControlCall(1, "flush_cache", [2.5]))
    assert [f.hex() for f in frames] == ["02", "9301ab666c7573685f636163686591cb4004000000000000"]
    assert wire.decode_engine_message(frames) == wire.ControlCall(1, "flush_cache", [2.5])
    reply = wire.encode(wire.ControlReplySlim(1, True, "ok", 0))
    assert reply.hex() == "95b0436f6e74726f6c5265706c79536c696d01c3a26f6b00"


def test_a_result_starts_with_the_pinned_bytes_and_appends_our_columns() -> None:
    payload = wire.encode(BATCH)
    columns = len(wire.BatchTokenIDOutSlim.__struct_fields__) + 1
    assert payload[:3] == b"\xdc" + columns.to_bytes(2, "big")
    assert payload[3 : 3 + len(BATCH_PREFIX_HEX) // 2].hex() == BATCH_PREFIX_HEX
    assert wire.decode_output(payload) == BATCH


@pytest.mark.parametrize("elements", range(9, 15))
def test_a_result_of_an_older_engine_is_read_whatever_it_leaves_out(elements: int) -> None:
    array = msgspec.msgpack.decode(wire.encode(BATCH))[:elements]
    batch = wire.decode_output(msgspec.msgpack.encode(array))
    assert isinstance(batch, wire.BatchTokenIDOutSlim)
    assert batch.output_ids == [[5, 6]]
    assert batch.matched_stops == []


def test_a_result_of_a_newer_engine_is_read_without_its_extra_columns() -> None:
    array = [*msgspec.msgpack.decode(wire.encode(BATCH)), ["new"], 3]
    assert wire.decode_output(msgspec.msgpack.encode(array)) == BATCH


@pytest.mark.parametrize("column", [2, 3, 4, 5, 6, 7, 8, 14, 20])
def test_a_result_with_a_ragged_column_is_refused(column: int) -> None:
    array = msgspec.msgpack.decode(wire.encode(BATCH))
    array[column] = [*array[column], *msgspec.msgpack.decode(wire.encode(BATCH))[column], None, None][:3]
    with pytest.raises(wire.WireError):
        wire.decode_output(msgspec.msgpack.encode(array))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\x00"],
        [b"\x00", b""],
        [b"\x00", b"\xc1"],
        [b"\x00", msgspec.msgpack.encode(["TokenizedGenerateReqInput", "r"])],
        [b"\x00", msgspec.msgpack.encode(["Other", "r"])],
        [b"\x01", msgspec.msgpack.encode("not a list")],
        [b"\x01", b"\x91\xa2\xff\xfe"],
        [b"\x02", msgspec.msgpack.encode([1])],
        [b"\x03", b"\x90"],
        [b"\x04", b"\x90"],
        [b"\x00\x00", b"\x90"],
    ],
)
def test_bytes_that_are_no_request_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_engine_message(frames)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", wire.encode(wire.Hello()), b"ENGINE"])
def test_bytes_that_are_no_result_are_refused(payload: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_output(payload)


def test_hello_and_ready_are_maps_told_apart_by_status() -> None:
    hello = msgspec.msgpack.decode(wire.encode(wire.Hello(engine_count=2)))
    assert hello == {
        "status": "HELLO",
        "local": True,
        "headless": True,
        "parallel_config_hash": None,
        "engine_count": 2,
    }
    assert "engine_count" not in msgspec.msgpack.decode(wire.encode(wire.Hello()))
    minimal = msgspec.msgpack.encode({"status": "HELLO", "extra": 1})
    assert wire.decode_handshake(minimal) == wire.Hello()
    assert wire.decode_handshake(wire.encode(wire.Ready())) == wire.Ready()
    with pytest.raises(wire.WireError):
        wire.decode_handshake(msgspec.msgpack.encode({"status": "BYE"}))


def test_init_without_an_address_is_refused() -> None:
    init = wire.Init(wire.InitAddresses(["ipc:///a"], ["ipc:///b"], None, None, None), {})
    assert wire.decode_init(wire.encode(init)) == init
    with pytest.raises(wire.WireError):
        wire.decode_init(wire.encode(wire.Init(wire.InitAddresses([], [], None, None, None), {})))


READY = {
    "max_model_len": 8192,
    "num_gpu_blocks": 10,
    "dtype": "float32",
    "vllm_version": "tokenspeed-0",
    "world_size": 1,
    "data_parallel_size": 1,
}


def test_a_ready_response_may_call_the_block_size_prefix_granularity() -> None:
    assert wire.decode_ready_response(msgspec.msgpack.encode(READY | {"block_size": 16})).block_size == 16
    assert wire.decode_ready_response(msgspec.msgpack.encode(READY | {"prefix_granularity": 64})).block_size == 64
    both = READY | {"prefix_granularity": 64, "block_size": 64}
    with pytest.raises(wire.WireError, match="duplicate field"):
        wire.decode_ready_response(msgspec.msgpack.encode(both))


@pytest.mark.parametrize("change", [{"dtype": "int8"}, {"max_model_len": "many"}, {"block_size": None}])
def test_a_ready_response_with_a_wrong_value_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_ready_response(msgspec.msgpack.encode(READY | {"block_size": 16} | change))


def test_a_ready_response_sends_no_key_that_has_nothing_to_say() -> None:
    response = wire.decode_ready_response(msgspec.msgpack.encode(READY | {"block_size": 16, "unknown": 1}))
    assert msgspec.msgpack.decode(wire.encode(response)) == READY | {"block_size": 16}
    assert not response.declares("BatchTokenIDOutSlim", "matched_stops")


def test_our_layouts_declare_every_column_in_order() -> None:
    layouts = wire.default_layouts()
    assert tuple(layouts["SamplingParams"][:29]) == wire.SamplingParamsWire.__struct_fields__
    assert layouts["SamplingParams"][29:] == ["allowed_token_ids", "bad_token_ids", "reasoning_end"]
    assert layouts["BatchTokenIDOutSlim"][13:17] == [
        "input_token_logprobs_val",
        "input_token_logprobs_idx",
        "finished_status_codes",
        "finished_messages",
    ]


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("ipc:///tmp/smg-zmq/ts0.ipc", 25152),
        ("ipc:///tmp/smg-zmq/ts1.ipc", 22735),
        ("ipc:///tmp/smg-zmq/engine-31000", 22714),
    ],
)
def test_the_handshake_port_of_an_ipc_url_is_its_hash(url: str, port: int) -> None:
    assert address.zmq_handshake_port(url) == port
    assert address.handshake_address(url) == f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("url", ["http://a:1", "tcp://a", "tcp://a:0", "tcp://*:5", "tcp://:5", "ipc://relative", ""])
def test_a_worker_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(address.AddressError):
        address.handshake_address(url)


def test_a_socket_path_that_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(address.AddressError, match="98 bytes"):
        address.data_addresses("ipc:///" + "x" * 120)
