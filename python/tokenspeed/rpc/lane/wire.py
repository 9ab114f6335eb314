# SPDX-License-Identifier: MIT
"""Messages of the ZMQ lane and their bytes.

Requests travel as frames `[type][payload][aux...]` from the gateway's ROUTER to an engine's DEALER; results as one
frame from the engine's PUSH to the gateway's PULL. Payloads are msgpack: positional arrays whose first element is
the struct's name, so a later column can be appended and an older peer still reads its prefix. The handshake uses
maps. Both ends, the scripted engine of the tests, and nobody else use this module; it owns no socket.
Decoding raises `WireError`, always; whoever reads from a socket drops the frame, warns and counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

FRAME_ADD = b"\x00"
FRAME_ABORT = b"\x01"
REASON_STOP = b"stop"
FRAME_CONTROL = b"\x02"
FRAME_ENCODE = b"\x03"

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"

TOP_K_OFF = 1 << 30
"""What `top_k` is on the wire when top-k filtering is off."""

GREEDY_TEMPERATURE = 1e-6
"""Below this temperature a request is greedy and travels as temperature 1, top_k 1."""


class WireError(ValueError):
    """Bytes that are no message of this lane; says what was expected."""


# ---- requests --------------------------------------------------------------------------------------------------


class SamplingParamsWire(msgspec.Struct, array_like=True, frozen=True):
    """The 29 positional sampling fields of a request, in normalised form."""

    max_new_tokens: int | None
    stop: list[str] | str | None
    stop_token_ids: list[int] | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    json_schema: str | None
    regex: str | None
    ebnf: str | None
    structural_tag: str | None
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    thinking_budget: int | None
    custom_params: Any
    stream_interval: int | None
    logit_bias: dict[int | str, float] | None
    seed: int | None
    logprobs: int | bool | None
    n: int
    stop_strs: list[str] | str | None
    stop_str_max_len: int
    is_normalized: bool


class MoreSamplingParamsWire(SamplingParamsWire, array_like=True, frozen=True):
    """With columns of ours behind the 29 that every peer knows. Sent only where they say something."""

    allowed_token_ids: list[int] | None = None
    bad_token_ids: list[list[int]] | None = None
    reasoning_end: str | None = None


class TokenizedGenerateReqInput(msgspec.Struct, array_like=True, frozen=True, tag="TokenizedGenerateReqInput"):
    """A generation request as an engine reads it. Senders may leave out any number of trailing fields."""

    rid: str
    http_worker_ipc: str | None
    input_text: str | None
    input_ids: list[int]
    sampling_params: MoreSamplingParamsWire
    return_logprob: bool
    logprob_start_len: int
    """First prompt position whose logprob is asked for; -1 asks for none."""
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    stream: bool
    input_embeds: Any = None
    session_params: Any = None
    custom_logit_processor: str | None = None
    return_hidden_states: bool = False
    created_time: float = 0.0
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    input_multi_ids: Any = None
    input_extra_infos: Any = None
    input_ids_unpadded: list[int] | None = None
    multimodal_inputs: Any = None
    validation_error: str | None = None
    data_parallel_rank: int | None = None
    priority: int = 0
    """Lower runs first. This column and those behind it are ours: sent to engines that declare them."""
    cache_salt: str | None = None
    """Prompts share cached prefixes with those of the same salt only."""
    traceparent: str | None = None
    """The caller's span, in W3C's form."""


class PlainGenerateReqInput(msgspec.Struct, array_like=True, frozen=True, tag="TokenizedGenerateReqInput"):
    """The first 11 elements of `TokenizedGenerateReqInput`: all that a text request needs, as gateways send it."""

    rid: str
    http_worker_ipc: str | None
    input_text: str | None
    input_ids: list[int]
    sampling_params: SamplingParamsWire
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    stream: bool


class _RequestId(msgspec.Struct, array_like=True, frozen=True, tag="TokenizedGenerateReqInput"):
    """The beginning of a `TokenizedGenerateReqInput`."""

    rid: str


class AddRequest(msgspec.Struct, frozen=True):
    """One request to admit, with the tensor frames that its payload refers to (1-based)."""

    request: TokenizedGenerateReqInput
    aux: list[bytes]


class AbortRequests(msgspec.Struct, frozen=True):
    """Requests that nobody waits for any more; unknown ids are normal (they ended meanwhile)."""

    request_ids: list[str]


class EndRequests(msgspec.Struct, frozen=True):
    """Requests whose text is complete (at a stop string): an ABORT that says so, for those who declared to read it."""

    request_ids: list[str]


class ControlCall(msgspec.Struct, frozen=True, array_like=True):
    """`flush_cache [timeout_s]`, `start_profile [{...}]`, `stop_profile []`; answered by a `ControlReplySlim`."""

    call_id: int | str
    method: str
    args: list[Any]


class UnreadRequest(msgspec.Struct, frozen=True):
    """A request that nobody can read and somebody waits for. status: as HTTP has it."""

    rid: str
    status: int
    code: str
    message: str


class UnreadCall(msgspec.Struct, frozen=True):
    """A control call of the same kind."""

    call_id: int | str
    message: str


EngineMessage = AddRequest | AbortRequests | EndRequests | ControlCall | UnreadRequest | UnreadCall


# ---- results ---------------------------------------------------------------------------------------------------

FinishReason = Literal["", "stop", "length", "abort"]


class BatchTokenIDOutSlim(msgspec.Struct, array_like=True, frozen=True, tag="BatchTokenIDOutSlim"):
    """What one step gave: a column per property, an element per request.

    The columns from `input_token_logprobs_val` on are only read by a gateway that saw them declared in
    `ReadyResponse.positional_layouts`; an engine that has nothing to say leaves them as empty lists. A batch without
    rows carries the load numbers only and shows that the engine's loop is alive.
    """

    rids: list[str]
    output_ids: list[list[int]]
    """New tokens of the request (not cumulative); a stop token that ended it is the last of them."""
    finished_reasons: list[FinishReason]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    """Cumulative."""
    cached_tokens: list[int]
    output_token_logprobs_val: list[list[float]]
    """A natural-log probability per new token, or an empty list when not asked for."""
    output_token_logprobs_idx: list[list[int]]
    engine_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_active_pages: int = 0
    kv_total_pages: int = 0
    input_token_logprobs_val: list[list[float | None]] = []
    """Prompt logprobs, in one batch only (the receiver concatenates); the first is null at position 0."""
    input_token_logprobs_idx: list[list[int]] = []
    finished_status_codes: list[int | None] = []
    """HTTP status for an `abort`; null or 0 when there is none."""
    finished_messages: list[str | None] = []
    output_top_logprobs_val: list[list[list[float]]] = []
    """Per new token, the logprobs of the `top_logprobs_num` most probable tokens, best first, then of the request's
    `token_ids_logprob` in its order."""
    output_top_logprobs_idx: list[list[list[int]]] = []
    matched_stops: list[int | None] = []
    """The stop or end-of-text token that ended the request."""
    input_top_logprobs_val: list[list[list[float]]] = []
    """As `input_token_logprobs_val`: those of the same kinds at each of those positions."""
    input_top_logprobs_idx: list[list[list[int]]] = []
    weight_versions: list[str | None] = []
    """The name of the weights that serve when the row is told."""

    def check_columns(self) -> None:
        """Raise `WireError` when a column is neither as long as `rids` nor an absent extra column."""
        rows = len(self.rids)
        for name in _REQUIRED_COLUMNS:
            if len(getattr(self, name)) != rows:
                raise WireError(f"BatchTokenIDOutSlim: column {name} has {len(getattr(self, name))} of {rows} rows")
        for name in _EXTRA_COLUMNS:
            if len(getattr(self, name)) not in (0, rows):
                raise WireError(f"BatchTokenIDOutSlim: column {name} has {len(getattr(self, name))} of {rows} rows")

    def of_rows(self, rows: Sequence[int]) -> BatchTokenIDOutSlim:
        """The batch with some of its rows only."""
        columns = {}
        for name in _REQUIRED_COLUMNS + _EXTRA_COLUMNS:
            column = getattr(self, name)
            columns[name] = [column[row] for row in rows] if column else []
        return msgspec.structs.replace(self, **columns)


_REQUIRED_COLUMNS = BatchTokenIDOutSlim.__struct_fields__[:8]
_EXTRA_COLUMNS = BatchTokenIDOutSlim.__struct_fields__[13:]


def refusal(rid: str, status: int, message: str, engine_index: int) -> BatchTokenIDOutSlim:
    """A batch that ends one request that nothing ran for. status: as HTTP has it."""
    return BatchTokenIDOutSlim(
        rids=[rid],
        output_ids=[[]],
        finished_reasons=["abort"],
        prompt_tokens=[0],
        completion_tokens=[0],
        cached_tokens=[0],
        output_token_logprobs_val=[[]],
        output_token_logprobs_idx=[[]],
        engine_index=engine_index,
        finished_status_codes=[status],
        finished_messages=[message],
    )


class ControlReplySlim(msgspec.Struct, array_like=True, frozen=True, tag="ControlReplySlim"):
    """The answer of one rank to a `ControlCall`."""

    call_id: int | str
    success: bool
    message: str
    engine_index: int


EngineOutput = BatchTokenIDOutSlim | ControlReplySlim


# ---- handshake -------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag_field="status", tag="HELLO"):
    """Engine to gateway, first: "I am here" (the identity of the socket says which rank)."""

    local: bool = True
    headless: bool = True
    parallel_config_hash: str | None = None
    engine_count: int | msgspec.UnsetType | None = msgspec.UNSET
    """How many ranks will dial; only the first one's number counts."""


class Ready(msgspec.Struct, frozen=True, tag_field="status", tag="READY"):
    """Engine to gateway, after INIT: the model is loaded and the data sockets are about to connect."""

    local: bool = True
    headless: bool = True
    parallel_config_hash: str | None = None


class InitAddresses(msgspec.Struct, frozen=True):
    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None
    coordinator_output: str | None
    frontend_stats_publish_address: str | None


class Init(msgspec.Struct, frozen=True):
    """Gateway to engine: where to connect the data plane."""

    addresses: InitAddresses
    parallel_config: dict[str, Any]


def _layout(struct: type[msgspec.Struct]) -> list[str]:
    return list(struct.__struct_fields__)


def default_layouts() -> dict[str, list[str]]:
    """The positional layouts that our engines declare: every column of every array-like message."""
    return {
        "TokenizedGenerateReqInput": _layout(TokenizedGenerateReqInput),
        "SamplingParams": _layout(MoreSamplingParamsWire),
        "BatchTokenIDOutSlim": _layout(BatchTokenIDOutSlim),
        "ControlReplySlim": _layout(ControlReplySlim),
    }


class ReadyResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine says about itself on its input socket; unknown keys are ignored on both sides."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: Literal["float16", "bfloat16", "float32"]
    vllm_version: str
    """`tokenspeed-<version>`; the key's name is the protocol's."""
    world_size: int
    data_parallel_size: int
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    data_parallel_rank: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    instance_id: str | None = None
    """The served model name."""
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: dict[str, Any] | None = None
    dp_stats_address: str | None = None
    multimodal_encoder_dtype: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    disaggregation_mode: str | None = None
    request_types: list[str] | None = None
    positional_layouts: dict[str, list[str]] | None = None
    tensor_aux_frames: bool | None = None
    abort_reasons: list[str] | None = None
    """What a frame behind the payload of an ABORT may say."""

    def declares(self, message: str, column: str) -> bool:
        """Whether the engine said that `message` has `column`."""
        return column in (self.positional_layouts or {}).get(message, ())


# ---- bytes -----------------------------------------------------------------------------------------------------

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoders raise; the last for arrays within arrays within arrays."""
_encoder = msgspec.msgpack.Encoder()
_add_decoder = msgspec.msgpack.Decoder(TokenizedGenerateReqInput)
_request_id_decoder = msgspec.msgpack.Decoder(_RequestId)
_abort_decoder = msgspec.msgpack.Decoder(list[str])
_control_decoder = msgspec.msgpack.Decoder(ControlCall)
_output_decoder = msgspec.msgpack.Decoder(EngineOutput)
_handshake_decoder = msgspec.msgpack.Decoder(Hello | Ready)
_init_decoder = msgspec.msgpack.Decoder(Init)
_ready_response_decoder = msgspec.msgpack.Decoder(ReadyResponse)


def identity_of(engine_index: int) -> bytes:
    """The socket identity of a rank: its index as two little-endian bytes."""
    if not 0 <= engine_index < 65536:
        raise WireError(f"engine index {engine_index} does not fit 16 bits")
    return engine_index.to_bytes(2, "little")


def encode(message: msgspec.Struct) -> bytes:
    """Msgpack bytes of any struct of this module."""
    return _encoder.encode(message)


def encode_request(message: PlainGenerateReqInput | TokenizedGenerateReqInput) -> list[bytes]:
    """Frames (after the identity) of an ADD without tensors."""
    return [FRAME_ADD, _encoder.encode(message)]


def encode_abort(request_ids: Sequence[str]) -> list[bytes]:
    """Frames (after the identity) of an ABORT."""
    return [FRAME_ABORT, _encoder.encode(list(request_ids))]


def encode_end(request_ids: Sequence[str]) -> list[bytes]:
    """Frames (after the identity) of an ABORT for requests whose text is complete."""
    return [*encode_abort(request_ids), REASON_STOP]


def encode_control(call: ControlCall) -> list[bytes]:
    """Frames (after the identity) of a CONTROL."""
    return [FRAME_CONTROL, _encoder.encode(call)]


def decode_engine_message(frames: Sequence[bytes]) -> EngineMessage:
    """What an engine received on its input socket. Raises `WireError`."""
    if len(frames) < 2:
        raise WireError(f"a request has a type and a payload frame, got {len(frames)}")
    kind, payload, *aux = frames
    if kind == FRAME_ADD:
        return AddRequest(_decode(_add_decoder, payload, "ADD"), aux)
    if kind == FRAME_ABORT:
        request_ids = _decode(_abort_decoder, payload, "ABORT")
        return EndRequests(request_ids) if aux == [REASON_STOP] else AbortRequests(request_ids)
    if kind == FRAME_CONTROL:
        return _decode(_control_decoder, payload, "CONTROL")
    if kind == FRAME_ENCODE:
        raise WireError("ENCODE is for encode workers; this engine generates")
    raise WireError(f"unknown request type {kind[:8]!r}")


def decode_request_id(payload: bytes) -> str:
    """The id of an ADD; the rest of it is not read. Raises `WireError`."""
    found: _RequestId = _decode(_request_id_decoder, payload, "ADD")
    return found.rid


def decode_output(payload: bytes) -> EngineOutput:
    """What a gateway received from an engine's output socket (not `ENGINE_CORE_DEAD`). Raises `WireError`."""
    message = _decode(_output_decoder, payload, "output")
    if isinstance(message, BatchTokenIDOutSlim):
        message.check_columns()
    return message


def decode_handshake(payload: bytes) -> Hello | Ready:
    """HELLO or READY of an engine. Raises `WireError`."""
    return _decode(_handshake_decoder, payload, "handshake")


def decode_init(payload: bytes) -> Init:
    """INIT of a gateway. Raises `WireError`."""
    init = _decode(_init_decoder, payload, "INIT")
    if not init.addresses.inputs or not init.addresses.outputs:
        raise WireError("INIT names no input or no output address")
    return init


def decode_ready_response(payload: bytes) -> ReadyResponse:
    """The registration of an engine; older peers name `block_size` `prefix_granularity`. Raises `WireError`."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except _UNREADABLE as error:
        raise WireError(f"ready response: {error}") from None
    if not isinstance(fields, dict):
        raise WireError("ready response: expected a map")
    if "prefix_granularity" in fields:
        if "block_size" in fields:
            raise WireError("ready response: duplicate field block_size (prefix_granularity is its alias)")
        fields["block_size"] = fields.pop("prefix_granularity")
    return _decode(_ready_response_decoder, _encoder.encode(fields), "ready response")


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes, what: str) -> Any:
    try:
        return decoder.decode(payload)
    except _UNREADABLE as error:
        raise WireError(f"{what}: {error}") from None
