# SPDX-License-Identifier: MIT
"""The tools of one request, as the machines see them: which names exist, and how each parameter's text is read.

Formats that write parameters as bare text (XML-like ones) say nothing of their types; the tool's schema does.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

_JSON_TYPES: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


class Tools:
    """Names with their parameters' JSON schemas."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = {name: schema if isinstance(schema, dict) else {} for name, schema in schemas.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def parameters(self, name: str) -> Sequence[str]:
        """The parameters of a tool in the schema's order."""
        properties = self._schemas.get(name, {}).get("properties")
        return list(properties) if isinstance(properties, dict) else []

    def types(self, name: str, parameter: str) -> set[str]:
        """JSON types that the schema allows; empty when it does not say."""
        properties = self._schemas.get(name, {}).get("properties")
        return _types_of(properties.get(parameter)) if isinstance(properties, dict) else set()

    def as_json(self, name: str, parameter: str, text: str) -> str:
        """A bare value as JSON text of a type that the schema allows, else as a string."""
        types = self.types(name, parameter)
        for candidate in _readings(text.strip()):
            try:
                value = json.loads(candidate, parse_constant=_refuse)
            except (ValueError, RecursionError):
                continue
            if not types or types & _JSON_TYPES[type(value)]:
                return candidate
        return json.dumps(text, ensure_ascii=False)


def _readings(text: str) -> Iterator[str]:
    """A value as JSON text, as it stands or from how Python writes it, which models mix up."""
    yield text
    if text in ("True", "False"):
        yield text.lower()
    elif text in ("None", "NULL", "Null", "nil"):
        yield "null"
    elif text[:1] in ("[", "{"):
        try:
            yield json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return  # neither


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _types_of(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {item for item in declared if isinstance(item, str)}
    for key in ("enum", "const"):
        if key in schema:
            values = schema[key] if key == "enum" else [schema[key]]
            if not isinstance(values, list):
                return set()
            return set().union(*(_JSON_TYPES.get(type(value), set()) for value in values)) if values else set()
    given = [schema.get(key) for key in ("anyOf", "oneOf")]
    branches = [_types_of(item) for items in given if isinstance(items, list) for item in items]
    return set().union(*branches) if branches and all(branches) else set()
