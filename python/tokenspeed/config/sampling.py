# SPDX-License-Identifier: MIT
"""What one request asks of the sampler, and the checks of it.

The gateway, the offline engine and the engine's admission all call `SamplingParams.validate`, so a value is legal
everywhere or nowhere. Every refusal is a `RequestError` that names the field and carries a code; nothing is clamped
or ignored. Pure: no torch, no clock, no randomness (seeds that nobody gave are drawn by the engine).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tokenspeed.config.constraint import KINDS, Constraint, ConstraintError
from tokenspeed.config.flags import FlagError

TOP_K_OFF = -1
MAX_LOGPROBS = 20
MAX_CHOSEN_LOGPROBS = 128
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_PRIORITY = 1_000_000
MAX_ID_CHARS = 1024
"""Of a request: it is said again in every message of the answer."""
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1

_U64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_DECIMAL = re.compile(r"0|-?[1-9][0-9]{0,18}")


class RequestError(ValueError):
    """The caller's fault. `field` is the parameter, `code` machine-readable, the text one sentence for people."""

    def __init__(self, field: str, code: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.message = message


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of one request are drawn and when it ends. `validate` before use."""

    max_new_tokens: int | None = None
    """None: as many as the context has room for."""
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = TOP_K_OFF
    """-1 and 0 are off."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Text that ends the request; a single string is one. Matched by whoever holds the text, not by the engine."""
    stop_token_ids: tuple[int, ...] = ()
    """Honoured with `ignore_eos` too."""
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    """Choices that are generated; the n with the highest mean logprob are given. None: n."""
    logprobs: int | None = None
    """None: no logprobs. 0: of the sampled token. k: also of the k most probable ones."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the prompt's own tokens but the first, which nothing comes before. Such a prompt is computed
    whole, whatever the cache has of it."""
    prompt_logprob_start: int = 0
    """First position of the prompt that `prompt_logprobs` is for."""
    token_ids_logprob: tuple[int, ...] = ()
    """Tokens whose logprobs are told at every position that has `logprobs` or `prompt_logprobs`."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may come (and whatever ends the request, if it is among them); () allows all."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences that must not appear in the output; one of a single token bars the token."""
    bad_words: tuple[str, ...] = ()
    """The same as text; whoever holds the tokenizer turns them into `bad_token_ids`."""
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    """At most one of these four: what the output is constrained to (`config.constraint`)."""
    reasoning_end: str | None = None
    """Text (such as "</think>") up to whose first appearance the output is not constrained."""
    logits_processor: Callable[..., Any] | None = None
    """`processor(output_ids, logits)`: changes float32 logits [vocabulary] in place or returns others. It sees the
    request's new tokens so far; in this process only, and only where the engine allows it."""
    custom_logit_processor: str | None = None
    """The same, serialised (`sampling.custom`); only where the engine allows it."""
    custom_params: Mapping[str, Any] | None = None
    """Handed to `custom_logit_processor`."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream_interval: int = 1
    """Tokens gathered before a stream hands them on."""

    def __post_init__(self) -> None:
        # A lone string and None are spellings of a list; every later reader sees a tuple.
        object.__setattr__(self, "stop", _as_tuple(self.stop, str))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids, int))
        object.__setattr__(self, "token_ids_logprob", _as_tuple(self.token_ids_logprob, int))
        object.__setattr__(self, "allowed_token_ids", _as_tuple(self.allowed_token_ids, int))
        object.__setattr__(self, "bad_words", _as_tuple(self.bad_words, str))
        bad = tuple(_as_tuple(sequence, int) for sequence in _as_tuple(self.bad_token_ids, int))
        object.__setattr__(self, "bad_token_ids", bad)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from names and values; an unknown name is a `RequestError`."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise RequestError(name, "unknown_parameter", f"{name} is not a sampling parameter")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token always wins."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def wants_penalties(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def num_generated(self) -> int:
        """Choices that are generated; `n` of them are given."""
        return self.n if self.best_of is None else self.best_of

    @property
    def constraint(self) -> Constraint | None:
        """What the output is constrained to."""
        for kind in KINDS:
            text = getattr(self, kind)
            if text is not None:
                return Constraint(kind, text, self.reasoning_end)
        return None

    def validate(self, vocab_size: int, max_model_len: int) -> None:
        """Raise `RequestError` for the first field that this model cannot honour. O(size of the parameters)."""
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, TOP_K_OFF, SEED_MAX)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        # Beyond these, float32 logits overflow.
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_int("stream_interval", self.stream_interval, 1, max_model_len)
        if self.seed is not None:
            _check_int("seed", self.seed, SEED_MIN, SEED_MAX)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, min(MAX_LOGPROBS, vocab_size))
        for name in (
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, "invalid_type", f"{name} must be true or false, got {getattr(self, name)!r}")
        _check_int("prompt_logprob_start", self.prompt_logprob_start, 0, SEED_MAX)
        self._validate_lengths(max_model_len)
        self._validate_stops(vocab_size)
        self._validate_bias(vocab_size)
        self._validate_token_lists(vocab_size)
        self._validate_constraint()

    def _validate_token_lists(self, vocab_size: int) -> None:
        chosen = self.token_ids_logprob
        for token in chosen:
            _check_int("token_ids_logprob", token, 0, vocab_size - 1)
        if len(chosen) > MAX_CHOSEN_LOGPROBS:
            message = f"token_ids_logprob has {len(chosen)} ids, at most {MAX_CHOSEN_LOGPROBS}"
            raise RequestError("token_ids_logprob", "invalid_value", message)
        if chosen and self.logprobs is None:
            raise RequestError("token_ids_logprob", "invalid_value", "token_ids_logprob goes with logprobs; give both")
        for token in self.allowed_token_ids:
            _check_int("allowed_token_ids", token, 0, vocab_size - 1)
        if len(self.bad_token_ids) + len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError("bad_words", "invalid_value", f"bad_words has more than {MAX_BAD_WORDS} entries")
        for sequence in self.bad_token_ids:
            if not 0 < len(sequence) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    "bad_token_ids",
                    "invalid_value",
                    f"bad_token_ids: a sequence has {len(sequence)} tokens, not 1 to {MAX_BAD_WORD_TOKENS}",
                )
            for token in sequence:
                _check_int("bad_token_ids", token, 0, vocab_size - 1)
        for word in self.bad_words:
            if not isinstance(word, str) or not word:
                raise RequestError(
                    "bad_words", "invalid_value", f"bad_words must be texts that are not empty: {word!r}"
                )

    def _validate_constraint(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise RequestError(given[1], "conflicting_parameters", f"{' and '.join(given)}: give one of them")
        for name in (*given, "reasoning_end", "custom_logit_processor"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(name, "invalid_type", f"{name} must be a string, got {type(value).__name__}")
        if self.reasoning_end is not None and (not given or not self.reasoning_end):
            raise RequestError(
                "reasoning_end", "invalid_value", "reasoning_end is a text that goes with a constraint; give both"
            )
        constraint = self.constraint
        if constraint is not None:
            try:
                constraint.prepared()
            except ConstraintError as error:
                raise RequestError(given[0], error.code, f"{given[0]}: {error}") from None

    def _validate_lengths(self, max_model_len: int) -> None:
        if self.max_new_tokens is not None:
            _check_int("max_new_tokens", self.max_new_tokens, 1, SEED_MAX)
        _check_int("min_new_tokens", self.min_new_tokens, 0, max_model_len)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                "min_new_tokens",
                "invalid_value",
                f"min_new_tokens ({self.min_new_tokens}) is more than max_new_tokens ({self.max_new_tokens})",
            )

    def _validate_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                "stop", "invalid_value", f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS}"
            )
        for text in self.stop:
            if not isinstance(text, str):
                raise RequestError("stop", "invalid_type", f"stop must be strings, got {text!r}")
            if not text:
                raise RequestError("stop", "invalid_value", "stop has an empty string, which every text contains")
            if len(text) > MAX_STOP_CHARS:
                message = f"stop has a string of {len(text)} characters, at most {MAX_STOP_CHARS}"
                raise RequestError("stop", "invalid_value", message)
        if len(self.stop_token_ids) > vocab_size:
            message = f"stop_token_ids has {len(self.stop_token_ids)} ids, more than the vocabulary of {vocab_size}"
            raise RequestError("stop_token_ids", "invalid_value", message)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, vocab_size - 1)

    def _validate_bias(self, vocab_size: int) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias", "invalid_type", "logit_bias must map token ids to numbers")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise RequestError(
                "logit_bias",
                "invalid_value",
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIASES}",
            )
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError("logit_bias", "invalid_type", f"logit_bias: {token!r} is not a token id")
            if not 0 <= token < vocab_size:
                raise RequestError(
                    "logit_bias",
                    "invalid_value",
                    f"logit_bias: token {token} is outside the vocabulary of {vocab_size}",
                )
            _check_number("logit_bias", bias, -100.0, 100.0)


PREFERRED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
"""What `--preferred-sampling-params` may hold."""


def preferred_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of requests that do not say these parameters. Raises FlagError."""
    flag = "--preferred-sampling-params"
    for name in values:
        if name not in PREFERRED:
            raise FlagError(flag, f"{name} is not one of {', '.join(PREFERRED)}")
    try:
        SamplingParams(**values).validate(2**31, 2**31)
    except RequestError as error:
        raise FlagError(flag, error.message) from None
    return dict(values)


def check_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise `RequestError` for an empty prompt or a token outside the vocabulary."""
    check_prompt_range(len(token_ids), min(token_ids, default=0), max(token_ids, default=0), vocab_size)


def check_prompt_range(num_tokens: int, lowest: int, highest: int, vocab_size: int) -> None:
    """`check_prompt` for who has the extremes already."""
    if num_tokens == 0:
        raise RequestError("prompt", "empty_prompt", "the prompt has no tokens")
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise RequestError(
            "prompt", "invalid_token_id", f"prompt: token {bad} is outside the vocabulary of {vocab_size}"
        )


def room_for_output(num_prompt_tokens: int, max_new_tokens: int | None, max_model_len: int) -> int:
    """How many tokens the request may generate.

    Raises `RequestError("prompt", "context_length_exceeded")` when prompt and output do not fit in `max_model_len`
    tokens; it names the limit, the prompt and what was asked for.
    """
    asked = 1 if max_new_tokens is None else max_new_tokens
    if num_prompt_tokens + asked > max_model_len:
        output = "no room for a token of output" if max_new_tokens is None else f"{max_new_tokens} tokens asked for"
        raise RequestError(
            "prompt",
            "context_length_exceeded",
            f"the context is {max_model_len} tokens; the prompt has {num_prompt_tokens}, with {output}",
        )
    return max_model_len - num_prompt_tokens if max_new_tokens is None else max_new_tokens


def check_priority(priority: int) -> None:
    """Raise `RequestError` for one that the scheduler does not order by."""
    _check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def bias_by_token(sent: Mapping[Any, float] | None) -> dict[int, float] | None:
    """Token ids of a mapping that was JSON once are decimal texts. Raises `RequestError` for a key that is none."""
    for key in sent or ():
        if isinstance(key, str) and not _DECIMAL.fullmatch(key):
            raise RequestError("logit_bias", "invalid_type", f"logit_bias: {key[:40]!r} is not a token id")
    return {int(key): bias for key, bias in sent.items()} if sent else None


def derive_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request: choice 0 keeps the request's own, so n = 1 and n > 1 agree on it."""
    if choice == 0:
        return seed
    return splitmix64(seed + choice * _GOLDEN) & SEED_MAX


def splitmix64(state: int) -> int:
    """The output of SplitMix64 (Steele, Lea and Flood, 2014) for `state`: 64 well-mixed bits."""
    z = (state + _GOLDEN) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def _as_tuple(value: Any, scalar: type) -> tuple[Any, ...]:
    if value is None or value == ():
        return ()
    if isinstance(value, scalar):
        return (value,)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return (value,)  # of the wrong type: validate() says so
    return tuple(value)


def _check_number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(name, "invalid_type", f"{name} must be a number, got {value!r}")
    inside = low < value <= high if low_open else low <= value <= high
    if not inside or not math.isfinite(value):
        bracket = "(" if low_open else "["
        raise RequestError(name, "invalid_value", f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, "invalid_type", f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        limits = f"at least {low}" if high == SEED_MAX and value < low else f"in [{low}, {high}]"
        raise RequestError(name, "invalid_value", f"{name} must be {limits}, got {value!r}")
