# SPDX-License-Identifier: MIT
"""Every error that a client can see: status, type, code, parameter, sentence.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`. Codes are for programs and never change;
messages are for people. Raised anywhere in the gateway, turned into bytes by the HTTP layer (or, once a stream has
begun, into an event of that stream).
"""

from __future__ import annotations

import http
import re
from collections.abc import Mapping
from dataclasses import fields

import msgspec

from tokenspeed.config.sampling import RequestError, SamplingParams

_encode = msgspec.json.Encoder().encode

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}
RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed: by a retry of ours, or of the client's."""

_ENGINE_FIELDS = frozenset({"prompt", *(field.name for field in fields(SamplingParams))})
_FIRST_WORD = re.compile(r"([a-z_]+):? ")
_MAX_MESSAGE, _MAX_PARAM = 4000, 200
"""Characters: what a caller wrote may stand in both, and may be of any length."""
_MESSAGE_WITH_CODE = re.compile(r"([a-z][a-z0-9_]{2,63}): (.+)", re.DOTALL)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"


class ApiError(Exception):
    """An answer other than success. `retry_after_s` becomes the header of that name."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = _shortened(message, _MAX_MESSAGE)
        self.param = None if param is None else _shortened(param, _MAX_PARAM)
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's coarse kind of error, from the status."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> bytes:
        """The JSON body."""
        return _encode({"error": self.fields})

    @property
    def fields(self) -> dict[str, str | None]:
        """What stands under `error`."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to this error."""
        headers = {"x-smg-error-code": self.code}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.code == "scheduler_preempted":
            headers["x-smg-preempted"] = "true"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def invalid(param: str, code: str, message: str) -> ApiError:
    """The caller's fault: 400."""
    return ApiError(400, code, message, param)


def in_callers_words(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error with the names that the caller's API has for our fields; `names` are ours -> theirs."""
    ours = next((name for name in names if error.param == name or (error.param or "").startswith(f"{name}.")), None)
    if ours is None or error.param is None:
        return error
    param = names[ours] + error.param.removeprefix(ours)
    message = error.message
    for name, theirs in names.items():
        if name == ours or "_" in name:  # others may be words of the sentence
            message = re.sub(rf"(?<![\w.]){re.escape(name)}\b", theirs, message)
    return ApiError(error.status, error.code, message, param, error.retry_after_s)


def with_flat_tools(error: ApiError) -> ApiError:
    """For APIs where a tool's name stands in the tool itself, not in a `function` of it."""
    param, message = (re.sub(r"(?<=\])\.function\b", "", text or "") for text in (error.param, error.message))
    return ApiError(error.status, error.code, message, param or None, error.retry_after_s)


def from_request_error(error: RequestError, names: Mapping[str, str]) -> ApiError:
    """A check of the request failed; `names` are the names that the caller uses for the fields."""
    name = names.get(error.field, error.field)
    message = error.message
    for ours, theirs in names.items():
        if ours != "prompt":  # in a sentence, the prompt is one whatever field it came in
            message = re.sub(rf"\b{re.escape(ours)}\b", theirs, message)
    return ApiError(400, error.code, message, name)


def from_engine(status: int | None, message: str | None, names: Mapping[str, str]) -> ApiError:
    """An engine ended the request with a status; its message may begin with `code: ` and then with the name of a field,
    which the caller knows by `names` (ours -> theirs)."""
    status = status or 500
    text = message or http.HTTPStatus(status).phrase if status in http.HTTPStatus._value2member_map_ else "aborted"
    with_code = _MESSAGE_WITH_CODE.fullmatch(text)
    code, text = (with_code[1], with_code[2]) if with_code else ("engine_refused", text)
    retry_after_s = 1 if status in (429, 503) else None
    word = _FIRST_WORD.match(text)
    param = word[1] if word and word[1] in _ENGINE_FIELDS else None
    return in_callers_words(ApiError(status, code, text, param, retry_after_s), names)


def no_available_workers(detail: str) -> ApiError:
    """Nobody can serve this now: 503, worth another try."""
    return ApiError(503, "no_available_workers", detail, None, 1)


def worker_lost(detail: str) -> ApiError:
    """The engine went away with the request in flight: 503, worth another try."""
    return ApiError(503, "worker_lost", detail, None, 1)
