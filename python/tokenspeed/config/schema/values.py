# SPDX-License-Identifier: MIT
"""Values against schemas in normal form: equality as JSON has it, validity, and whether two schemas can share a value.

Pure helpers of `normal`. `holds` is exact for normal schemas; `disjoint` may say False when it does not know.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from tokenspeed.config.schema.matching import found_in

Schema = Any
"""A schema in normal form: False, or a mapping."""

_MAX_REF_DEPTH = 16


def kind(value: Any) -> str:
    """The JSON type of a value; a number without a fraction is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if float(value).is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 is 1.0 and is not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def identity(value: Any) -> Hashable:
    """A key that two JSON values share where they are `same`."""
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, list):
        return list, tuple(map(identity, value))
    if isinstance(value, dict):
        return dict, frozenset((key, identity(inner)) for key, inner in value.items())
    key: Hashable = value
    return key


def those_that_hold(schema: Schema, values: Sequence[Any], defs: Mapping[str, Schema]) -> list[Any]:
    """The values that are valid under `schema`."""
    if schema is not False and "enum" in schema:
        allowed = set(map(identity, schema["enum"]))
        return [value for value in values if identity(value) in allowed]
    return [value for value in values if holds(schema, value, defs)]


def holds(schema: Schema, value: Any, defs: Mapping[str, Schema]) -> bool:
    """Whether `value` is valid under `schema`; `defs` are the schemas that references name."""
    if schema is False:
        return False
    if "$ref" in schema:
        return holds(defs[schema["$ref"]], value, defs)
    if "anyOf" in schema:
        return any(holds(branch, value, defs) for branch in schema["anyOf"])
    if "enum" in schema:
        return any(same(value, option) for option in schema["enum"])
    if "type" not in schema:
        return True
    actual = kind(value)
    if actual != schema["type"] and (actual, schema["type"]) != ("integer", "number"):
        return False
    if actual in ("null", "boolean"):
        return True
    if actual == "object":
        return _object_holds(schema, value, defs)
    if actual == "array":
        return _array_holds(schema, value, defs)
    return _string_holds(schema, value) if actual == "string" else _number_holds(schema, value)


def _number_holds(schema: Mapping[str, Any], value: Any) -> bool:
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or value % schema["multipleOf"] == 0)
    )


def _string_holds(schema: Mapping[str, Any], value: str) -> bool:
    fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    return fits and ("pattern" not in schema or found_in(schema["pattern"], value))


def _array_holds(schema: Mapping[str, Any], value: list[Any], defs: Mapping[str, Schema]) -> bool:
    prefix = schema.get("prefixItems", [])
    items = schema.get("items", {})
    return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and all(
        holds(prefix[i] if i < len(prefix) else items, element, defs) for i, element in enumerate(value)
    )


def _object_holds(schema: Mapping[str, Any], value: dict[str, Any], defs: Mapping[str, Schema]) -> bool:
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        return False
    if any(name not in value for name in schema.get("required", ())):
        return False
    return all(holds(_of_property(schema, name), element, defs) for name, element in value.items())


def _of_property(schema: Mapping[str, Any], name: str) -> Schema:
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    for pattern, inner in schema.get("patternProperties", {}).items():
        if found_in(pattern, name):
            return inner
    return schema.get("additionalProperties", {})


def disjoint(a: Schema, b: Schema, defs: Mapping[str, Schema], depth: int = 0) -> bool:
    """Whether provably no value is valid under both."""
    if a is False or b is False:
        return True
    if depth > _MAX_REF_DEPTH:
        return False
    if "$ref" in a or "$ref" in b:
        a, b = (defs[s["$ref"]] if "$ref" in s else s for s in (a, b))
        return disjoint(a, b, defs, depth + 1)
    if "anyOf" in a or "anyOf" in b:
        lefts, rights = a.get("anyOf", [a]), b.get("anyOf", [b])
        return all(disjoint(left, right, defs, depth + 1) for left in lefts for right in rights)
    if "enum" in a:
        return not any(holds(b, value, defs) for value in a["enum"])
    if "enum" in b:
        return disjoint(b, a, defs, depth)
    if "type" not in a or "type" not in b:
        return False
    if a["type"] != b["type"]:
        return {a["type"], b["type"]} != {"integer", "number"}
    return a["type"] == "object" and _objects_disjoint(a, b, defs, depth + 1)


def _objects_disjoint(a: Mapping[str, Any], b: Mapping[str, Any], defs: Mapping[str, Schema], depth: int) -> bool:
    """A property that one requires and the other has otherwise, or not at all."""
    return any(
        disjoint(_of_property(one, name), _of_property(other, name), defs, depth)
        for one, other in ((a, b), (b, a))
        for name in one.get("required", ())
    )
