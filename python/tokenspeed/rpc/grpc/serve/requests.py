# SPDX-License-Identifier: MIT
"""From a `GenerateRequest` to the engine's requests, one a choice. What the engine does not have is refused by name.

Pure: nothing is sent. Values are checked here as everywhere, by `SamplingParams.validate` and the engine's admission.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from google.protobuf import json_format

from tokenspeed.config.resolve import AdmissionConfig
from tokenspeed.config.sampling import (
    MAX_ID_CHARS,
    RequestError,
    SamplingParams,
    bias_by_token,
    check_priority,
    derive_seed,
)
from tokenspeed.engine.admission import check_data_rank, check_processor, check_request
from tokenspeed.engine.lane_frontend import salt_number
from tokenspeed.engine.messages import Add
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb

_SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_CONSTRAINTS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
}
_SEED_BITS = 63


@dataclass(frozen=True)
class GenerateJob:
    """A request on its way: `adds[i]` and `params[i]` are those of choice i."""

    request_id: str
    adds: list[Add]
    streams: bool
    keeps_stop: bool
    """Whether a stop token that ends a choice stays in its tokens."""

    def placed(self, data_rank: int) -> GenerateJob:
        """The same, bound for a replica."""
        return replace(self, adds=[replace(add, data_rank=data_rank) for add in self.adds])


def choice_id(request_id: str, index: int, count: int) -> str:
    """The engine's name of a choice."""
    return request_id if count == 1 else f"{request_id}-n{index}"


def belongs_to(rid: str, request_id: str) -> bool:
    """Whether the engine's request `rid` is the request or one of its choices."""
    head, dash, tail = rid.rpartition("-n")
    return rid == request_id or (dash == "-n" and head == request_id and tail.isdecimal())


def to_job(
    request: pb.GenerateRequest,
    defaults: Mapping[str, float],
    admission: AdmissionConfig,
    num_replicas: int,
    traceparent: str | None,
) -> GenerateJob:
    """defaults: what the model recommends where a request says nothing. traceparent: the caller's span. Raises
    RequestError."""
    _refuse_absent(request)
    data_rank = request.data_parallel_rank if request.HasField("data_parallel_rank") else None
    check_data_rank(data_rank, num_replicas)
    _check_id(request.request_id)
    params = _params(request, defaults, admission)
    params.validate(admission.vocab_size, admission.max_model_len)
    sent_ids = np.array(request.tokenized.input_ids, np.int64)
    single = replace(params, n=1)
    check_request(sent_ids, single, admission)
    check_processor(single, admission)
    check_priority(request.priority)
    token_ids = sent_ids.astype(np.int32)
    base = secrets.randbits(_SEED_BITS) if params.seed is None and params.n > 1 else params.seed
    adds = []
    for index in range(params.n):
        choice = replace(
            single,
            seed=base if base is None else derive_seed(base, index),
            # The prompt is the same for all choices: one scores it.
            prompt_logprobs=None if index else params.prompt_logprobs,
        )
        rid = choice_id(request.request_id, index, params.n)
        salt = salt_number(request.cache_salt)
        adds.append(Add(rid, token_ids, choice, request.priority, salt, traceparent, data_rank))
    return GenerateJob(request.request_id, adds, request.stream, request.sampling_params.no_stop_trim)


def _refuse_absent(request: pb.GenerateRequest) -> None:
    absent = {
        "mm_inputs": (bool(request.mm_inputs.items), "images, video or audio"),
        "encode_bootstrap_info": (request.HasField("encode_bootstrap_info"), "encoders in other processes"),
        "kv_bootstrap_info": (request.HasField("kv_bootstrap_info"), "prefill/decode disaggregation"),
    }
    for field, (present, what) in absent.items():
        if present:
            raise RequestError(field, "unsupported", f"{field}: this engine does not have {what}")


def _params(request: pb.GenerateRequest, defaults: Mapping[str, float], admission: AdmissionConfig) -> SamplingParams:
    sent = request.sampling_params
    values: dict[str, Any] = dict(defaults)
    values |= {name: _shortest(getattr(sent, name)) for name in _SCALARS if sent.HasField(name)}
    if (kind := sent.WhichOneof("constraint")) is not None:
        values[_CONSTRAINTS[kind]] = getattr(sent, kind)
    scores_prompt = request.return_logprob and _logprob_start(request) >= 0
    return SamplingParams(
        **values,
        max_new_tokens=sent.max_new_tokens if sent.HasField("max_new_tokens") else None,
        min_new_tokens=sent.min_new_tokens,
        stop=tuple(sent.stop),
        stop_token_ids=tuple(sent.stop_token_ids),
        ignore_eos=sent.ignore_eos,
        logit_bias=bias_by_token(sent.logit_bias),
        seed=_seed(sent),
        n=sent.n or 1,
        logprobs=request.top_logprobs_num if request.return_logprob else None,
        prompt_logprobs=request.top_logprobs_num if scores_prompt else None,
        prompt_logprob_start=request.logprob_start_len if scores_prompt else 0,
        token_ids_logprob=tuple(request.token_ids_logprob),
        stream_interval=sent.stream_interval or admission.stream_interval,
        reasoning_end=sent.reasoning_end if sent.HasField("reasoning_end") else None,
        allowed_token_ids=tuple(sent.allowed_token_ids),
        bad_token_ids=tuple(tuple(sequence.token_ids) for sequence in sent.bad_token_ids),
        custom_logit_processor=request.custom_logit_processor if request.HasField("custom_logit_processor") else None,
        custom_params=_custom_params(sent),
        skip_special_tokens=sent.skip_special_tokens,
    )


def _check_id(request_id: str) -> None:
    if not request_id:
        raise RequestError("request_id", "missing_required_parameter", "request_id is empty")
    if len(request_id) > MAX_ID_CHARS:
        message = f"request_id has {len(request_id)} characters, at most {MAX_ID_CHARS}"
        raise RequestError("request_id", "string_above_max_length", message)


def _logprob_start(request: pb.GenerateRequest) -> int:
    """The first position whose logprob is wanted; -1 for none."""
    start = request.logprob_start_len if request.HasField("logprob_start_len") else -1
    num_tokens = len(request.tokenized.input_ids)
    if not -1 <= start <= num_tokens:
        raise RequestError(
            "logprob_start_len", "invalid_value", f"logprob_start_len must be in [-1, {num_tokens}], got {start}"
        )
    return start


def _custom_params(sent: pb.SamplingParams) -> dict[str, Any] | None:
    try:
        return json_format.MessageToDict(sent.custom_params) or None
    except ValueError:
        # A Struct can hold what JSON cannot: NaN and infinities.
        raise RequestError("custom_params", "invalid_value", "custom_params has a number that is not finite") from None


def _shortest(value: float | int) -> float | int:
    """The number that was meant: 0.7 travels as the float32 next to it, and the other lanes carry 0.7."""
    return value if isinstance(value, int) else float(str(np.float32(value)))


def _seed(sent: pb.SamplingParams) -> int | None:
    """Seeds are signed in the engine; the wire has them unsigned."""
    if not sent.HasField("sampling_seed"):
        return None
    seed = int(sent.sampling_seed)
    return seed - 2**64 if seed >= 2**63 else seed
