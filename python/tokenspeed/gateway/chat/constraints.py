# SPDX-License-Identifier: MIT
"""Which field of a request constrains the output, under all the names that clients use, as one constraint.

Pure. OpenAI's `response_format`; `json_schema`, `regex`, `ebnf` and `structural_tag` by themselves; vLLM's
`structured_outputs` and the `guided_*` names before it. Two of them in one request are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.config.constraint import ANY_OBJECT
from tokenspeed.gateway.http.errors import ApiError, invalid

MAX_OPTIONS = 1024


class ConstraintFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields, unread. None: not given."""

    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


@dataclass(frozen=True)
class Chosen:
    """`field`: what the caller called it. `kind` and `text` as in `config.constraint`."""

    field: str
    kind: str
    text: str


def chosen_constraint(fields: ConstraintFields) -> Chosen | None:
    """The request's constraint. Raises `ApiError` 400 for several, or for one that cannot be read."""
    found: list[Chosen] = []
    for name, read in _READERS.items():
        value = getattr(fields, name)
        if value is not None:
            found += read(name, value)
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(entry.field for entry in found))
        raise invalid(found[1].field, "conflicting_parameters", f"{names} all constrain the output: give one of them")
    return found[0] if found else None


def _as_text(field: str, value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(kind: str) -> Callable[[str, Any], list[Chosen]]:
    return lambda field, value: [Chosen(field, kind, _as_text(field, value))]


def _options(field: str, value: Any) -> list[Chosen]:
    """One of some texts, to the letter."""
    if not isinstance(value, list) or not value or not all(isinstance(option, str) and option for option in value):
        raise invalid(field, "invalid_value", f"{field} must be an array of texts that are not empty")
    if len(value) > MAX_OPTIONS:
        raise invalid(field, "invalid_value", f"{field} has {len(value)} options, at most {MAX_OPTIONS}")
    elements = [{"type": "const_string", "value": option} for option in value]
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
    return [Chosen(field, "structural_tag", json.dumps(tag, ensure_ascii=False))]


def _response_format(field: str, value: Any) -> list[Chosen]:
    kind = value.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [Chosen(field, "json_schema", ANY_OBJECT)]
    if kind == "structural_tag":
        return [Chosen(field, "structural_tag", json.dumps(value, ensure_ascii=False))]
    if kind != "json_schema":
        raise invalid(
            f"{field}.type",
            "invalid_value",
            f"{field}.type must be text, json_object, json_schema or structural_tag, not {kind!r}",
        )
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise _missing(f"{field}.json_schema")
    if not isinstance(inner.get("name"), str | None):
        raise invalid(f"{field}.json_schema.name", "invalid_type", "name must be a string")
    if not isinstance(inner.get("strict"), (bool, type(None))):
        raise invalid(f"{field}.json_schema.strict", "invalid_type", "strict must be true or false")
    if inner.get("schema") is None:
        raise _missing(f"{field}.json_schema.schema")
    # With strict false, too: what is asked for is what comes.
    return [Chosen(field, "json_schema", json.dumps(inner["schema"], ensure_ascii=False))]


def _missing(param: str) -> ApiError:
    return invalid(param, "missing_required_parameter", f"{param} is required")


def _structured_outputs(field: str, value: Any) -> list[Chosen]:
    found: list[Chosen] = []
    for name, option in value.items():
        if option is None or option is False:
            continue
        where = f"{field}.{name}"
        if name == "json_object":
            found.append(Chosen(where, "json_schema", ANY_OBJECT))
        elif name == "choice":
            found += _options(where, option)
        elif name in _NAMES:
            if not isinstance(option, (str, dict)):
                raise invalid(where, "invalid_type", f"{where} must be a string or an object")
            found.append(Chosen(where, _NAMES[name], _as_text(where, option)))
        else:
            raise invalid(where, "unsupported_parameter", f"{where} is not supported")
    return found


_NAMES = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}

_READERS: dict[str, Callable[[str, Any], list[Chosen]]] = {
    "response_format": _response_format,
    "json_schema": _plain("json_schema"),
    "regex": _plain("regex"),
    "ebnf": _plain("ebnf"),
    "structural_tag": _plain("structural_tag"),
    "structured_outputs": _structured_outputs,
    "guided_json": _plain("json_schema"),
    "guided_regex": _plain("regex"),
    "guided_choice": _options,
    "guided_grammar": _plain("ebnf"),
}
