# SPDX-License-Identifier: MIT
"""The loop's frontend towards a gateway: lane messages to commands, step outputs to batches.

Owns the `EngineLane`. When the gateway goes away everything is aborted (nobody reads it any more) and the lane dials
again. What a request asks for and this engine does not have is rejected by name, with an HTTP status.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import numpy as np

from tokenspeed.config.sampling import TOP_K_OFF, RequestError, SamplingParams, bias_by_token, check_priority
from tokenspeed.engine.messages import (
    Abort,
    AbortAll,
    Add,
    Command,
    Connected,
    Control,
    End,
    Refused,
    Rejection,
    StepOutput,
)
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.engine_end import EngineLane, LaneLost, LaneTimeout
from tokenspeed.rpc.lane.wire import UnreadCall, UnreadRequest

logger = logging.getLogger("tokenspeed.engine")

# Short, so that a stop is heard between two calls; the lane goes on with the same dialling.
_REDIAL_S = 0.2

_ABSENT_FEATURES = {
    "thinking_budget": "a thinking budget",
    "stop": "stop strings in the engine (the gateway matches them)",
    "stop_strs": "stop strings in the engine (the gateway matches them)",
}
_ABSENT_INPUTS = {
    "input_embeds": "embeddings as input",
    "session_params": "sessions",
    "return_hidden_states": "hidden states",
    "bootstrap_room": "prefill/decode disaggregation",
    "multimodal_inputs": "images, video or audio",
}


class LaneFrontend:
    """`lane` is connected."""

    def __init__(self, lane: EngineLane) -> None:
        self._lane = lane
        self._lost = False
        self._is_new = True

    def drain(self, timeout_s: float) -> list[Command]:
        if self._is_new:
            self._is_new = False
            return [Connected()]
        if self._lost:
            return self._redial(timeout_s)
        try:
            messages = self._lane.poll(timeout_s)
        except LaneLost as error:
            self._lost = True
            return [AbortAll(str(error))]
        return [command for message in messages if (command := self._command(message)) is not None]

    def publish(self, output: StepOutput) -> None:
        if self._lost:
            return  # there is nobody to read it
        self._lane.send(to_batch(output, self._lane.engine_index))

    def _redial(self, timeout_s: float) -> list[Command]:
        """Dial again, but only once nothing runs any more: then the loop is willing to wait."""
        if timeout_s > 0:
            try:
                self._lane.connect(_REDIAL_S)
                self._lost, self._is_new = False, True
                logger.info("connected to a gateway again")
            except LaneTimeout:
                pass  # the lane itself says now and then that it waits
        return []

    def _command(self, message: wire.EngineMessage) -> Command | None:
        """None for what is answered here."""
        if isinstance(message, UnreadCall):
            self._lane.reply(message, False, message.message)
            return None
        if isinstance(message, UnreadRequest):
            return Refused(Rejection(message.rid, message.status, "", message.code, message.message))
        if isinstance(message, wire.AbortRequests):
            return Abort(message.request_ids)
        if isinstance(message, wire.EndRequests):
            return End(message.request_ids)
        if isinstance(message, wire.ControlCall):
            call = message
            return Control(call.method, call.args, lambda success, text: self._lane.reply(call, success, text))
        request = message.request
        try:
            return to_add(request)
        except RequestError as error:
            return Refused(Rejection(request.rid, 400, error.field, error.code, error.message))


def to_add(request: wire.TokenizedGenerateReqInput) -> Add:
    """Raises RequestError for what this engine does not have. Values are checked at admission."""
    if request.validation_error:
        raise RequestError("request", "invalid_request", request.validation_error)
    _refuse_present(request, _ABSENT_INPUTS)
    _refuse_present(request.sampling_params, _ABSENT_FEATURES)
    try:
        token_ids = np.array(request.input_ids, np.int32)
    except OverflowError:
        raise RequestError("prompt", "invalid_token_id", "prompt: a token id does not fit 32 bits") from None
    check_priority(request.priority)
    salt = salt_number(request.cache_salt)
    return Add(request.rid, token_ids, _params(request), request.priority, salt, request.traceparent)


def salt_number(salt: str | None) -> int:
    """The scheduler's number of a salt, the same in every engine: 0 for none, else 62 bits of its hash and never 0."""
    if not salt:
        return 0
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8]) >> 2 or 1


def _params(request: wire.TokenizedGenerateReqInput) -> SamplingParams:
    sent = request.sampling_params
    scores_prompt = request.return_logprob and request.logprob_start_len >= 0
    # The wire's greedy form is temperature 1 with top_k 1.
    greedy = sent.top_k == 1 or sent.temperature < wire.GREEDY_TEMPERATURE
    return SamplingParams(
        max_new_tokens=sent.max_new_tokens,
        min_new_tokens=sent.min_new_tokens,
        temperature=0.0 if greedy else sent.temperature,
        top_p=sent.top_p,
        top_k=TOP_K_OFF if greedy or sent.top_k >= wire.TOP_K_OFF else sent.top_k,
        min_p=sent.min_p,
        frequency_penalty=sent.frequency_penalty,
        presence_penalty=sent.presence_penalty,
        repetition_penalty=sent.repetition_penalty,
        stop_token_ids=tuple(sent.stop_token_ids or ()),
        ignore_eos=sent.ignore_eos,
        logit_bias=bias_by_token(sent.logit_bias),
        seed=sent.seed,
        n=sent.n,
        logprobs=request.top_logprobs_num if request.return_logprob else None,
        prompt_logprobs=request.top_logprobs_num if scores_prompt else None,
        prompt_logprob_start=request.logprob_start_len if scores_prompt else 0,
        token_ids_logprob=tuple(request.token_ids_logprob or ()),
        stream_interval=sent.stream_interval or 1,
        json_schema=sent.json_schema,
        regex=sent.regex,
        ebnf=sent.ebnf,
        structural_tag=sent.structural_tag,
        reasoning_end=sent.reasoning_end,
        allowed_token_ids=tuple(sent.allowed_token_ids or ()),
        bad_token_ids=tuple(tuple(sequence) for sequence in sent.bad_token_ids or ()),
        custom_logit_processor=request.custom_logit_processor,
        custom_params=_custom_params(sent.custom_params),
    )


def _custom_params(sent: Any) -> dict[str, Any] | None:
    if sent is not None and not isinstance(sent, dict):
        raise RequestError("custom_params", "invalid_type", "custom_params is an object")
    return sent or None


def _refuse_present(struct: Any, absent: dict[str, str]) -> None:
    for name, what in absent.items():
        if getattr(struct, name) not in (None, False, [], {}, ""):
            raise _absent(name, what)


def _absent(field: str, what: str) -> RequestError:
    return RequestError(field, "unsupported", f"{field}: this engine does not have {what}")


def to_batch(output: StepOutput, engine_index: int) -> wire.BatchTokenIDOutSlim:
    """The lane's columns: the step's rows, then the rejections as rows that abort with a status and a message."""
    rejected = output.rejections
    extra = len(rejected)
    rows = len(output.rids) + extra
    logprobs = output.logprobs
    batch: dict[str, Any] = {
        "rids": output.rids + [rejection.rid for rejection in rejected],
        "output_ids": output.token_ids + [[]] * extra,
        "finished_reasons": output.finish + ["abort"] * extra,
        "prompt_tokens": output.prompt_tokens + [0] * extra,
        "completion_tokens": output.completion_tokens + [0] * extra,
        "cached_tokens": output.cached_tokens + [0] * extra,
        "output_token_logprobs_val": [[]] * rows,
        "output_token_logprobs_idx": [[]] * rows,
        "engine_index": engine_index,
        "num_running": output.load.num_running,
        "num_waiting": output.load.num_waiting,
        "kv_active_pages": output.load.active_blocks,
        "kv_total_pages": output.load.total_blocks,
        "matched_stops": [token if token >= 0 else None for token in output.matched_tokens] + [None] * extra,
        "weight_versions": [output.weight_version] * rows,
    }
    if logprobs is not None:
        tail: list[Any] = [[]] * extra
        batch["output_token_logprobs_val"] = [entry.values if entry else [] for entry in logprobs] + tail
        batch["output_token_logprobs_idx"] = [
            tokens if entry else [] for entry, tokens in zip(logprobs, output.token_ids)
        ] + tail
        batch["output_top_logprobs_val"] = [entry.top_values if entry else [] for entry in logprobs] + tail
        batch["output_top_logprobs_idx"] = [entry.top_ids if entry else [] for entry in logprobs] + tail
    if output.prompt_logprobs is not None:
        scores = output.prompt_logprobs
        nothing: list[Any] = [[]] * extra
        batch["input_token_logprobs_val"] = [entry.values if entry else [] for entry in scores] + nothing
        batch["input_token_logprobs_idx"] = [entry.token_ids if entry else [] for entry in scores] + nothing
        batch["input_top_logprobs_val"] = [entry.top_values if entry else [] for entry in scores] + nothing
        batch["input_top_logprobs_idx"] = [entry.top_ids if entry else [] for entry in scores] + nothing
    if rejected:
        batch["finished_status_codes"] = [None] * len(output.rids) + [rejection.status for rejection in rejected]
        batch["finished_messages"] = [None] * len(output.rids) + [_told(entry) for entry in rejected]
    return wire.BatchTokenIDOutSlim(**batch)


def _told(rejection: Rejection) -> str:
    """Code, field and message; the field is the message's first word, as far as there is one at fault."""
    message, field = rejection.message, rejection.field
    if field and not message.startswith((f"{field}: ", f"{field} ")):
        message = f"{field}: {message}"
    return f"{rejection.code}: {message}"
