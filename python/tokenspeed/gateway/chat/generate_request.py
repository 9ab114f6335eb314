# SPDX-License-Identifier: MIT
"""`POST /generate`: SGLang's request for text or token ids, from the body to a `Job`.

`sampling_params` has the engine's own names (`max_new_tokens`, `min_new_tokens`); everything else means what it means
in a text completion. A list of prompts is answered by a list.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from tokenspeed.config.sampling import RequestError, SamplingParams
from tokenspeed.gateway.chat.choice import TextRules
from tokenspeed.gateway.chat.completion_request import MAX_PROMPTS
from tokenspeed.gateway.chat.fields import (
    SamplingFields,
    caller_names,
    convert,
    handling,
    parse_body,
)
from tokenspeed.gateway.chat.generate_format import GenerateFormat, GenerateShape
from tokenspeed.gateway.chat.job import Job, check_room
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.http.errors import ApiError, from_request_error, in_callers_words, invalid

DEFAULT_MAX_TOKENS = 128
_OUTSIDE = {"model", "stream", "stream_options", "priority", "cache_salt", "data_parallel_rank"}
"""Fields of other APIs' requests that say nothing of sampling: here they stand beside `sampling_params`."""
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | None = None
    model: str | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool | None = None
    logprob_start_len: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None


async def generate_job(body: bytes, model: ServedModel, request_id: str) -> Job:
    """Check everything that can be checked without an engine. Raises `ApiError`."""
    request, _ = await parse_body(body, GenerateRequest)
    try:
        return await _job(request, model, request_id)
    except ApiError as error:
        raise in_callers_words(error, {ours: theirs for theirs, ours in _RENAMED.items()}) from None


async def _job(request: GenerateRequest, model: ServedModel, request_id: str) -> Job:
    model.check_name(request.model)
    start = -1 if request.logprob_start_len is None else request.logprob_start_len
    if start < -1:
        raise invalid("logprob_start_len", "invalid_value", "logprob_start_len is -1 or a position in the prompt")
    fields = _sampling_fields(request)
    num_top = request.top_logprobs_num or 0
    asked_top = num_top if request.return_logprob else None
    sampling = model.sampling.of(fields, asked_top, model.max_model_len)
    if request.return_logprob and start >= 0:
        sampling = sampling.replace(prompt_logprobs=num_top, prompt_logprob_start=start)
    chosen = tuple(request.token_ids_logprob or ())
    if chosen:
        sampling = sampling.replace(token_ids_logprob=chosen)
        _check_chosen(sampling.params, model)
    params = sampling.params
    prompts, batched = await _prompts(request, model)
    if request.return_logprob and start >= min(map(len, prompts)):
        message = f"logprob_start_len ({start}) is not a position in a prompt of {min(map(len, prompts))} tokens"
        raise invalid("logprob_start_len", "invalid_value", message)
    check_room(fields, prompts, _source(request), model.tokenizer.size, model.max_model_len)
    rid = request.rid or request_id
    ids = [rid] if len(prompts) * params.n == 1 else [f"{rid}-{i}" for i in range(len(prompts) * params.n)]
    logprobs = bool(request.return_text_in_logprobs) if request.return_logprob else None
    lengths = [len(prompt) for prompt in prompts]
    shape = GenerateShape(ids, lengths, params.n, batched or params.n > 1, logprobs, num_top, bool(chosen))
    return Job(
        # The engine's id is our own: a client's may be in use.
        request_id=f"gen-{request_id}",
        endpoint="generate",
        prompts=prompts,
        sampling=sampling,
        handling=handling(request.priority, request.cache_salt, request.data_parallel_rank),
        max_tokens=params.max_new_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        candidates=params.n,
        rules=TextRules(
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            hidden=model.tokenizer.hidden(params.skip_special_tokens, frozenset()),
            continues=True,
            min_tokens=params.min_new_tokens,
            logprobs=params.logprobs is not None,
        ),
        reply=None,
        format=GenerateFormat(shape, model.tokenizer),
        stream=bool(request.stream),
        names={**caller_names(fields), "prompt": _source(request)},
    )


def _check_chosen(params: SamplingParams, model: ServedModel) -> None:
    try:
        params.validate(model.tokenizer.size, model.max_model_len)
    except RequestError as error:
        raise from_request_error(error, {"logprobs": "return_logprob"}) from None


def _sampling_fields(request: GenerateRequest) -> SamplingFields:
    given = dict(request.sampling_params or {})
    known = {*SamplingFields.__struct_fields__, *_RENAMED, "spaces_between_special_tokens"} - _OUTSIDE
    for name, value in given.items():
        if name not in known and value is not None:
            where = f"sampling_params.{name}"
            raise invalid(where, "unsupported_parameter", f"{where} is not supported")
    if given.get("prompt_logprobs") is not None:
        where = "sampling_params.prompt_logprobs"
        raise invalid(where, "unsupported_parameter", f"{where}: use return_logprob with logprob_start_len")
    if given.get("spaces_between_special_tokens") is False:
        where = "sampling_params.spaces_between_special_tokens"
        raise invalid(where, "unsupported_parameter", f"{where}: text is returned as the model wrote it")
    return convert(
        {_RENAMED.get(name, name): value for name, value in given.items()}, SamplingFields, "sampling_params"
    )


def _source(request: GenerateRequest) -> str:
    """The field that the prompts are in."""
    return "text" if request.text is not None else "input_ids"


async def _prompts(request: GenerateRequest, model: ServedModel) -> tuple[list[list[int]], bool]:
    """(token ids of every prompt, whether they came as a list)."""
    if (request.text is None) == (request.input_ids is None):
        raise invalid("text", "invalid_value", "exactly one of text and input_ids is needed")
    if request.input_ids is not None:
        given = request.input_ids
        # There may be millions, which are refused whatever they are.
        kinds = set(map(type, given[: model.max_model_len + 1]))
        if len(kinds) > 1:
            raise invalid("input_ids", "invalid_type", "input_ids mixes token ids and lists of token ids")
        batched = list in kinds
        prompts = cast(list[list[int]], given if batched else [given] if given else [])
    else:
        texts = [request.text] if isinstance(request.text, str) else request.text or []
        prompts = [await model.encode(text, "text", add_special_tokens=True) for text in texts]
        batched = not isinstance(request.text, str)
    param = _source(request)
    if not prompts:
        raise invalid(param, "empty_array", f"{param} must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise invalid(param, "invalid_value", f"{param} has {len(prompts)} prompts, at most {MAX_PROMPTS}")
    return prompts, batched
