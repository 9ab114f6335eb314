# SPDX-License-Identifier: MIT
"""The keywords of JSON Schema: which constrain and how their values must look, which only annotate, which we refuse.

`check_words` is what every schema passes first. A keyword that no draft knows is an annotation, as the specification
has it; one that would constrain and that a grammar cannot hold is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenspeed.config.schema.error import SchemaError

MAX_DEPTH = 100
MAX_NODES = 20_000
_MAX_COUNT = 2**31 - 1

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")

# Keyword -> values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "uniqueItems": (False,),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "$dynamicRef": (),
    "$recursiveRef": (),
    "extends": (),
    "disallow": (),
    "divisibleBy": (),
    "additionalItems": (True,),
    "nullable": (False,),
}

_BY_TYPE = {
    "properties": "object",
    "required": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "propertyNames": "object",
    "minProperties": "object",
    "maxProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "pattern": "string",
    "minLength": "string",
    "maxLength": "string",
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
}


def types_of(words: dict[str, Any]) -> list[str]:
    """The types that a value may have: as written, or those that the keywords are about; [] is any."""
    if "type" in words:
        types = words["type"] if isinstance(words["type"], list) else [words["type"]]
        # An integer is a number: one name is enough.
        return [name for name in types if name != "integer" or "number" not in types]
    found = dict.fromkeys(_BY_TYPE[key] for key in words if key in _BY_TYPE)
    return list(found) or (["string"] if "format" in words else [])


def check_words(schema: Any, path: str, is_root: bool) -> dict[str, Any]:
    """The keywords of a schema that constrain, each of the right shape, `const` as `enum`. Raises `SchemaError`."""
    if not isinstance(schema, dict):
        raise SchemaError(path, f"a schema is an object or a boolean, not {_kind(schema)}")
    words: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _REFUSED and not any(value is neutral or value == neutral for neutral in _REFUSED[key]):
            raise SchemaError(path, f"the keyword {key!r} is not supported")
        if key == "$id" and not is_root:
            raise SchemaError(path, "the keyword '$id' is supported at the root of a schema only")
        check = _SHAPES.get(key)
        if check is not None:
            check(key, value, path)
            words[key] = value
    if "const" in words:
        value = words.pop("const")
        if "enum" in words:
            words["allOf"] = [*words.get("allOf", []), {"enum": [value]}]
        else:
            words["enum"] = [value]
    return words


def _kind(value: Any) -> str:
    return {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}.get(type(value), repr(value))


def _bad(key: str, value: Any, path: str, wanted: str) -> SchemaError:
    return SchemaError(path, f"{key!r} must be {wanted}, not {str(value)[:80]!r}")


def _type(key: str, value: Any, path: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or any(name not in TYPES for name in names if isinstance(name, str)) or len(names) > len(TYPES):
        raise _bad(key, value, path, f"of {', '.join(TYPES)}")
    if not all(isinstance(name, str) for name in names):
        raise _bad(key, value, path, "a string or an array of strings")


def _count(key: str, value: Any, path: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= _MAX_COUNT or value != int(value):
        raise _bad(key, value, path, f"an integer from 0 to {_MAX_COUNT}")


def _number(key: str, value: Any, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        raise _bad(key, value, path, "a number below 1e15 in size")


def _multiple(key: str, value: Any, path: str) -> None:
    _number(key, value, path)
    if value <= 0:
        raise _bad(key, value, path, "more than 0")


def _text(key: str, value: Any, path: str) -> None:
    if not isinstance(value, str):
        raise _bad(key, value, path, "a string")


def _names(key: str, value: Any, path: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _bad(key, value, path, "an array of strings")


def _schema(key: str, value: Any, path: str) -> None:
    if not isinstance(value, (dict, bool)):
        raise _bad(key, value, path, "a schema")


def _schemas(key: str, value: Any, path: str) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(item, (dict, bool)) for item in value):
        raise _bad(key, value, path, "an array of schemas that is not empty")


def _named_schemas(key: str, value: Any, path: str) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, (dict, bool)) for item in value.values()):
        raise _bad(key, value, path, "an object of schemas")


def _values(key: str, value: Any, path: str) -> None:
    if not isinstance(value, list) or not value:
        raise _bad(key, value, path, "an array that is not empty")


def _anything(key: str, value: Any, path: str) -> None:
    return


_SHAPES: dict[str, Callable[[str, Any, str], None]] = {
    "type": _type,
    "enum": _values,
    "const": _anything,
    "$ref": _text,
    "allOf": _schemas,
    "anyOf": _schemas,
    "oneOf": _schemas,
    "properties": _named_schemas,
    "patternProperties": _named_schemas,
    "additionalProperties": _schema,
    "propertyNames": _schema,
    "required": _names,
    "items": _schema,
    "prefixItems": _schemas,
    "pattern": _text,
    "format": _text,
    "multipleOf": _multiple,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _number),
}
