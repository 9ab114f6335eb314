# SPDX-License-Identifier: MIT
"""Between the lane's structs, which the gateway speaks, and the messages of an engine behind gRPC. Pure.

A stop token that ends a choice travels beside the tokens here and as the last of them on the lane; top-k that is off
is -1 here; seeds are unsigned here. What an engine says in a status becomes the row that the lane has for it.
"""

from __future__ import annotations

import math
from typing import Any

import grpc

from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.wire import BatchTokenIDOutSlim, PlainGenerateReqInput, TokenizedGenerateReqInput
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb

_CONSTRAINTS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf_grammar",
    "structural_tag": "structural_tag",
}
_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.CANCELLED: 502,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


def to_request(request: PlainGenerateReqInput | TokenizedGenerateReqInput, rank: int | None) -> pb.GenerateRequest:
    """rank: the one that must serve it; None where there is one only."""
    sampling = request.sampling_params
    sent = pb.GenerateRequest(
        request_id=request.rid,
        tokenized=pb.TokenizedInput(input_ids=request.input_ids),
        sampling_params=_sampling(sampling),
        return_logprob=request.return_logprob,
        logprob_start_len=request.logprob_start_len,
        top_logprobs_num=request.top_logprobs_num,
        token_ids_logprob=request.token_ids_logprob or (),
        stream=request.stream,
    )
    if rank is not None:
        sent.data_parallel_rank = rank
    for name in ("custom_logit_processor", "cache_salt"):
        value = getattr(request, name, None)
        if value is not None:
            setattr(sent, name, value)
    sent.priority = getattr(request, "priority", 0)
    return sent


def _sampling(params: wire.SamplingParamsWire) -> pb.SamplingParams:
    sent = pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=-1 if params.top_k >= wire.TOP_K_OFF else params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        stop_token_ids=params.stop_token_ids or (),
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        n=1,
        logit_bias={str(token): bias for token, bias in (params.logit_bias or {}).items()},
        no_stop_trim=params.no_stop_trim,
    )
    if params.seed is not None:
        sent.sampling_seed = params.seed % 2**64
    for ours, theirs in _CONSTRAINTS.items():
        if getattr(params, ours) is not None:
            setattr(sent, theirs, getattr(params, ours))
    if params.custom_params:
        sent.custom_params.update(params.custom_params)
    if isinstance(params, wire.MoreSamplingParamsWire):
        sent.allowed_token_ids.extend(params.allowed_token_ids or ())
        sent.bad_token_ids.extend(pb.TokenSequence(token_ids=sequence) for sequence in params.bad_token_ids or ())
        if params.reasoning_end is not None:
            sent.reasoning_end = params.reasoning_end
    return sent


def to_batch(response: pb.GenerateResponse, rid: str, streams: bool, rank: int) -> BatchTokenIDOutSlim:
    """One row. streams: whether the tokens came in chunks before the end."""
    if response.WhichOneof("response") == "chunk":
        chunk = response.chunk
        return _batch(rid, rank, list(chunk.token_ids), "", None, chunk, _scores(chunk.output_logprobs))
    complete = response.complete
    matched = complete.matched_token_id if complete.WhichOneof("matched_stop") == "matched_token_id" else None
    ids = [] if streams else list(complete.output_ids)
    scores = _Scores() if streams else _scores(complete.output_logprobs)
    finish = complete.finish_reason if complete.finish_reason in ("stop", "length", "abort") else "abort"
    if finish == "stop" and (not ids or ids[-1] != matched):
        # The lane's last token of a choice that stopped is the one that stopped it; one that nobody names is none.
        ids = [*ids, *([] if matched is None else [matched])]
    return _batch(rid, rank, ids, finish, matched, complete, scores)


def to_refusal(error: grpc.aio.AioRpcError, rid: str, rank: int) -> BatchTokenIDOutSlim:
    """The row that ends a request as the call's status says."""
    status = _HTTP_STATUS.get(error.code(), 500)
    return wire.refusal(rid, status, error.details() or error.code().name.lower(), rank)


def to_timeout(limit_s: float, rid: str, rank: int) -> BatchTokenIDOutSlim:
    """The row that ends a request whose call took too long."""
    message = f"call_upstream_timeout: the worker took more than {limit_s:g} s"
    return wire.refusal(rid, 504, message, rank)


def to_ready(model: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse) -> wire.ReadyResponse:
    """What an engine says about itself, in the lane's terms; older ones leave much of it out."""
    args = dict(server.server_args)
    block_size = int(args.get("page_size") or args.get("block_size") or 1)
    tokens = server.max_total_num_tokens or int(args.get("max_total_tokens") or 0)
    num_ranks = max(1, int(args.get("dp_size") or 1))
    return wire.ReadyResponse(
        max_model_len=model.max_context_length or int(args.get("max_model_len") or args.get("context_length") or 2**31),
        num_gpu_blocks=tokens // block_size,
        block_size=block_size,
        dtype=model.model_dtype if model.model_dtype in ("float16", "float32") else "bfloat16",
        vllm_version=f"tokenspeed-{server.tokenspeed_version}",
        world_size=1,
        data_parallel_size=num_ranks,
        max_num_seqs=int(args["max_num_seqs"]) // num_ranks if args.get("max_num_seqs") else None,
        instance_id=str(args.get("served_model_name") or model.served_model_name or model.model_path) or None,
        # Fields of ours are protobuf's to skip where an engine does not know them.
        positional_layouts=wire.default_layouts(),
    )


class _Scores:
    """Logprobs of a row's tokens as the lane's columns have them."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.ids: list[int] = []
        self.top_values: list[list[float]] = []
        self.top_ids: list[list[int]] = []


def _scores(sent: pb.OutputLogProbs) -> _Scores:
    scores = _Scores()
    scores.values, scores.ids = list(sent.token_logprobs), list(sent.token_ids)
    scores.top_values = [list(best.values) for best in sent.top_logprobs]
    scores.top_ids = [list(best.token_ids) for best in sent.top_logprobs]
    return scores


def _batch(
    rid: str,
    rank: int,
    ids: list[int],
    finish: str,
    matched: int | None,
    part: pb.GenerateStreamChunk | pb.GenerateComplete,
    scores: _Scores,
) -> BatchTokenIDOutSlim:
    prompt = part.prompt_logprobs if part.HasField("prompt_logprobs") else None
    return BatchTokenIDOutSlim(
        rids=[rid],
        output_ids=[ids],
        finished_reasons=[finish],  # type: ignore[list-item]
        prompt_tokens=[part.prompt_tokens],
        completion_tokens=[part.completion_tokens],
        cached_tokens=[part.cached_tokens],
        output_token_logprobs_val=[scores.values],
        output_token_logprobs_idx=[scores.ids],
        engine_index=rank,
        output_top_logprobs_val=[scores.top_values],
        output_top_logprobs_idx=[scores.top_ids],
        matched_stops=[matched],
        weight_versions=[part.weight_version if part.HasField("weight_version") else None],
        **({} if prompt is None else _prompt_columns(prompt)),
    )


def _prompt_columns(sent: pb.PromptLogProbs) -> dict[str, Any]:
    return {
        "input_token_logprobs_val": [[None if math.isnan(value) else value for value in sent.token_logprobs]],
        "input_token_logprobs_idx": [list(sent.token_ids)],
        "input_top_logprobs_val": [[list(best.values) for best in sent.top_logprobs]] if sent.top_logprobs else [],
        "input_top_logprobs_idx": [[list(best.token_ids) for best in sent.top_logprobs]] if sent.top_logprobs else [],
    }
