# SPDX-License-Identifier: MIT
"""The conjunction of two schemas as one schema, where that can be written down; else `SchemaError` names the keyword.

`normal` uses it for allOf, for keywords beside $ref, and to hand the keywords beside anyOf to its branches. Works on
schemas as clients write them; what lies inside (properties, items) is joined lazily by an inner allOf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tokenspeed.config.schema.error import SchemaError
from tokenspeed.config.schema.values import same, those_that_hold

_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_CHOICES = ("anyOf", "oneOf", "$ref")


def merged(a: Any, b: Any, path: str) -> Any:
    """What both `a` and `b` allow. A second choice or reference becomes a member of an allOf."""
    if a is False or b is False:
        return False
    if a is True or a == {} or same(a, b):
        return b
    if b is True or b == {}:
        return a
    out: dict[str, Any] = {}
    nested: list[Any] = []
    for schema in (a, b):
        nested += schema.get("allOf", [])
        for key in _CHOICES:
            if key in schema and key not in out:
                out[key] = schema[key]
            elif key in schema:
                nested.append({key: schema[key]})
    plain_a, plain_b = ({k: v for k, v in s.items() if k not in (*_CHOICES, "allOf")} for s in (a, b))
    for key in {**plain_a, **plain_b}:
        if key in plain_a and key in plain_b:
            _JOIN.get(key, _refuse_unequal)(out, key, plain_a, plain_b, path)
        elif key not in _TOGETHER:
            out[key] = plain_a[key] if key in plain_a else plain_b[key]
    if out.pop("never", False):
        return False
    _join_objects(out, plain_a, plain_b, path)
    _join_arrays(out, plain_a, plain_b)
    if nested:
        out["allOf"] = nested
    return out


_TOGETHER = ("properties", "patternProperties", "additionalProperties", "prefixItems", "items")

_Join = Callable[[dict[str, Any], str, dict[str, Any], dict[str, Any], str], None]


def _larger(out: dict[str, Any], key: str, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    out[key] = max(a[key], b[key])


def _smaller(out: dict[str, Any], key: str, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    out[key] = min(a[key], b[key])


def _required(out: dict[str, Any], key: str, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    out[key] = list(dict.fromkeys([*a[key], *b[key]]))


def _types(out: dict[str, Any], key: str, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    left, right = (value if isinstance(value, list) else [value] for value in (a[key], b[key]))
    both = [name for name in left if name in right]
    if ("integer" in left and "number" in right) or ("number" in left and "integer" in right):
        both = [name for name in both if name != "number"] + ["integer"] * ("integer" not in both)
    out[key] = both
    out["never"] = out.get("never", False) or not both


def _enum(out: dict[str, Any], key: str, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    out[key] = those_that_hold({"enum": b[key]}, a[key], {})
    out["never"] = out.get("never", False) or not out[key]


def _multiple(out: dict[str, Any], key: str, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    if not (isinstance(a[key], int) and isinstance(b[key], int)):
        _refuse_unequal(out, key, a, b, path)
    else:
        out[key] = math.lcm(a[key], b[key])


def _refuse_unequal(out: dict[str, Any], key: str, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    if not same(a[key], b[key]):
        raise SchemaError(path, f"two different {key!r} for one value cannot be combined")
    out[key] = a[key]


def _skip(out: dict[str, Any], key: str, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    return


_JOIN: dict[str, _Join] = {
    **dict.fromkeys(_LARGER, _larger),
    **dict.fromkeys(_SMALLER, _smaller),
    **dict.fromkeys(_TOGETHER, _skip),
    "required": _required,
    "type": _types,
    "enum": _enum,
    "multipleOf": _multiple,
}


def _join_objects(out: dict[str, Any], a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    if not any(key in schema for schema in (a, b) for key in ("properties", "additionalProperties")):
        _only_one(out, "patternProperties", a, b, path)
        return
    if "patternProperties" in a or "patternProperties" in b:
        raise SchemaError(path, "'patternProperties' cannot be combined with the properties of another schema")
    mine, others = a.get("properties", {}), b.get("properties", {})
    properties = {}
    for name in {**mine, **others}:
        parts = [schema.get("properties", {}).get(name, schema.get("additionalProperties", True)) for schema in (a, b)]
        properties[name] = _both(*parts)
    if properties:
        out["properties"] = properties
    additional = [schema["additionalProperties"] for schema in (a, b) if "additionalProperties" in schema]
    if additional:
        out["additionalProperties"] = additional[0] if len(additional) == 1 else _both(*additional)


def _only_one(out: dict[str, Any], key: str, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    if key in a and key in b:
        _refuse_unequal(out, key, a, b, path)
    elif key in a or key in b:
        out[key] = a.get(key, b.get(key))


def _join_arrays(out: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> None:
    mine, others = a.get("prefixItems", []), b.get("prefixItems", [])
    length = max(len(mine), len(others))
    if length:
        out["prefixItems"] = [
            _both(*(s["prefixItems"][i] if i < len(s.get("prefixItems", [])) else s.get("items", True) for s in (a, b)))
            for i in range(length)
        ]
    if "items" in a or "items" in b:
        out["items"] = _both(a.get("items", True), b.get("items", True))


def _both(a: Any, b: Any) -> Any:
    if a is True or same(a, b):
        return b
    if b is True:
        return a
    return False if a is False or b is False else {"allOf": [a, b]}
