# SPDX-License-Identifier: MIT
"""Request fields that chat and text completions share: their types, what is refused by name, and their meaning.

Every sampling field that OpenAI, vLLM or SGLang know is either honoured (a field of `SamplingFields`) or refused with
a 400 that names it (`REFUSED`); a value that asks for nothing (null, an empty list, the default) is let through.
Fields that nobody knows are ignored, as OpenAI's clients expect.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tokenspeed.config.sampling import MAX_PRIORITY
from tokenspeed.gateway.chat.constraints import ConstraintFields, chosen_constraint
from tokenspeed.gateway.chat.format import UsageOptions
from tokenspeed.gateway.chat.large_json import LARGE, decode_large
from tokenspeed.gateway.http.errors import ApiError, invalid

T = TypeVar("T", bound=msgspec.Struct)

MAX_SALT = 1024
"""Characters."""


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Handling(msgspec.Struct, frozen=True):
    """How the engine handles a request beside its tokens."""

    priority: int
    """Lower runs first; 0 is everybody's."""
    cache_salt: str | None
    """Cached prefixes are shared only among requests with the same salt."""
    data_rank: int | None
    """The worker's data-parallel rank that must serve it."""

    @property
    def columns(self) -> dict[str, Any]:
        """The lane's columns that say it; empty where there is nothing to say."""
        if not (self.priority or self.cache_salt or self.data_rank is not None):
            return {}
        given = {"priority": self.priority, "cache_salt": self.cache_salt}
        columns = {name: value for name, value in given.items() if value}
        return columns if self.data_rank is None else {**columns, "data_parallel_rank": self.data_rank}


def handling(priority: int | None, cache_salt: str | None, data_rank: int | None) -> Handling:
    """From the fields of these names, of whatever API. Raises `ApiError` 400."""
    if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise invalid("priority", "invalid_value", f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    if cache_salt and len(cache_salt) > MAX_SALT:
        message = f"cache_salt has {len(cache_salt)} characters, at most {MAX_SALT}"
        raise invalid("cache_salt", "string_above_max_length", message)
    return Handling(priority or 0, cache_salt or None, data_rank)


class SamplingFields(ConstraintFields, frozen=True, kw_only=True):
    """The fields that decide which tokens come, as clients spell them. None: not given."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_ids: list[list[int]] | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    data_parallel_rank: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


_GRAMMAR = "the server decides how constraints are compiled"
_TOOLS = "use tools and tool_choice"
_LORA = "adapters are not available on this server"

# name -> (values that ask for nothing, why others are refused)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "text": ((), "this is the Responses API's field; use response_format"),
    "guided_decoding_backend": ((), _GRAMMAR),
    "guided_whitespace_pattern": ((), _GRAMMAR),
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((), "only text is generated"),
    "prediction": ((), "predicted output is not used"),
    "web_search_options": ((), "this server searches nothing"),
    "verbosity": (("medium",), "the model takes no verbosity"),
    "service_tier": (("auto", "default", "standard_only"), "this server has one tier"),
    "store": ((False,), "this server stores no completions"),
    "use_beam_search": ((False,), "beam search is not available"),
    "length_penalty": ((1, 1.0), "beam search is not available"),
    "early_stopping": ((False,), "beam search is not available"),
    "top_a": ((0, 0.0), "this sampler is not available"),
    "typical_p": ((1, 1.0), "this sampler is not available"),
    "tfs": ((1, 1.0), "this sampler is not available"),
    "mirostat": ((0,), "this sampler is not available"),
    "dry_multiplier": ((0, 0.0), "this sampler is not available"),
    "xtc_probability": ((0, 0.0), "this sampler is not available"),
    "no_repeat_ngram_size": ((0,), "this sampler is not available"),
    "stop_regex": (([],), "stop strings are matched literally"),
    "logits_processors": (([],), "custom logit processors are not available"),
    "vllm_xargs": (({},), "custom logit processors are not available"),
    "logprob_token_ids": (([],), "POST /generate has token_ids_logprob"),
    "token_ids_logprob": (([],), "POST /generate has it"),
    "logprob_start_len": ((-1,), "prompt logprobs are not available"),
    "return_hidden_states": ((False,), "hidden states are not available"),
    "input_embeds": ((), "prompts are text or token ids"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "truncate_prompt_tokens": ((), "prompts are never cut"),
    "detokenize": ((True,), "text is always returned"),
    "return_tokens_as_token_ids": ((False,), "return_token_ids returns them beside the text"),
    "return_prompt_text": ((False,), "the prompt's text is not returned"),
    "spaces_between_special_tokens": ((True,), "text is returned as the model wrote it"),
    "thinking_budget": ((), "thinking is not limited"),
    "thinking_token_budget": ((), "thinking is not limited"),
    "mm_processor_kwargs": (({},), "only text is understood"),
    "media_io_kwargs": (({},), "only text is understood"),
    "lora_path": ((), _LORA),
    "lora_adapter": ((), _LORA),
    "extra_key": (("",), "use cache_salt"),
    "session_params": (({},), "sessions are not available"),
    "kv_transfer_params": (({},), "this server is not disaggregated"),
    "bootstrap_host": ((), "this server is not disaggregated"),
    "bootstrap_port": ((), "this server is not disaggregated"),
    "bootstrap_room": ((), "this server is not disaggregated"),
    "repetition_detection": ((), "this option is not available"),
    "return_cached_tokens_details": ((False,), "only the number of cached tokens is returned"),
    "return_routed_experts": ((False,), "this option is not available"),
}

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some clients on Windows send it; it is no part of JSON."""
_BOUNDS_FOR = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_token_ids": "bad_words_ids",
}


async def parse_body(body: bytes, kind: type[T]) -> tuple[T, dict[str, Any]]:
    """The request in `body` (and the object itself, for fields outside `kind`). Raises `ApiError` 400."""
    body = body.removeprefix(_BYTE_ORDER_MARK)
    try:
        fields = msgspec.json.decode(body) if len(body) < LARGE else await asyncio.to_thread(decode_large, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    refuse_by_name(fields, kind)
    return convert(fields, kind, ""), fields


def convert(fields: Mapping[str, Any], kind: type[T], where: str) -> T:
    """`fields` as a `kind`; `where` is the path of their object in the body. Raises `ApiError` 400."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        # 16.0 is an integer too (JSON Schema, draft 6 on), and what some languages write for one.
        whole = {name: int(value) for name, value in fields.items() if isinstance(value, float) and value.is_integer()}
        if whole:
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert({**fields, **whole}, kind)
        raise _invalid_field(str(error), where) from None


def refuse_by_name(fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raise `ApiError` 400 for the first known field that asks for something we do not do."""
    own = kind.__struct_fields__
    for name, value in fields.items():
        refused = REFUSED.get(name)
        if refused is None or value is None or name in own:
            continue
        neutral, reason = refused
        if value not in neutral:
            raise invalid(name, "unsupported_parameter", f"{name} is not supported: {reason}")


def _invalid_field(text: str, where: str) -> ApiError:
    """The sentence of msgspec, `... - at `$.path``, as an error with a parameter."""
    sentence, _, path = text.partition(" - at `$")
    param = (where + path.rstrip("`")).lstrip(".")
    missing = re.match(r"Object missing required field `([^`]+)`", sentence)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return invalid(param, "missing_required_parameter", f"{param} is required")
    return invalid(param, "invalid_type", f"{param or 'the body'}: {sentence[0].lower()}{sentence[1:]}")


def caller_names(fields: SamplingFields) -> dict[str, str]:
    """Our names for things -> the caller's."""
    names = dict(_BOUNDS_FOR)
    if fields.max_completion_tokens is not None:
        names["max_new_tokens"] = "max_completion_tokens"
    chosen = chosen_constraint(fields)
    if chosen is not None:
        names[chosen.kind] = chosen.field
    if "top_logprobs" in fields.__struct_fields__:
        names["logprobs"] = "top_logprobs"
    return names


def usage_options(fields: SamplingFields) -> UsageOptions:
    """`stream_options` as a format reads them."""
    options = fields.stream_options or StreamOptions()
    return UsageOptions(options.include_usage or options.continuous_usage_stats, options.continuous_usage_stats)
