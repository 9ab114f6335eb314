# SPDX-License-Identifier: MIT
"""One type with its keywords, in normal form. Each function keeps or narrows what is valid, or raises `SchemaError`.

Pure helpers of `normal`; `inner(schema, where)` normalises a schema inside this one. False: no value is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tokenspeed.config.schema.error import SchemaError
from tokenspeed.config.schema.regex import check_regex

Inner = Callable[[Any, str], Any]

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
"""Those that compilers know; others annotate, as the specification has it by default."""


def of_string(words: dict[str, Any], path: str) -> Any:
    out: dict[str, Any] = {"type": "string"}
    low, high = int(words.get("minLength", 0)), words.get("maxLength")
    if high is not None and low > high:
        return False
    if "pattern" in words:
        check_regex(words["pattern"], path)
        if low or high is not None:
            raise SchemaError(
                path, "'pattern' beside 'minLength' or 'maxLength' is not supported; say it in the pattern"
            )
        return out | {"pattern": words["pattern"]}
    if low:
        out["minLength"] = low
    if high is not None:
        out["maxLength"] = int(high)
    if len(out) == 1 and words.get("format") in _FORMATS:
        out["format"] = words["format"]
    return out


def of_number(name: str, words: dict[str, Any], path: str) -> Any:
    multiple = words.get("multipleOf")
    if multiple is not None:
        if multiple != int(multiple):
            raise SchemaError(path, "'multipleOf' is supported for integers only")
        name = "integer"
    bounds: dict[str, Any] = {key: words[key] for key in _BOUNDS if key in words}
    if name == "integer":
        return _integer(bounds, None if multiple is None else int(multiple), path)
    low = max(bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf))
    high = min(bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf))
    open_ended = low in (bounds.get("exclusiveMinimum"),) or high in (bounds.get("exclusiveMaximum"),)
    if low > high or (low == high and open_ended):
        return False
    out: dict[str, Any] = {"type": "number"}
    if low > -math.inf:
        out["exclusiveMinimum" if low == bounds.get("exclusiveMinimum") else "minimum"] = low
    if high < math.inf:
        out["exclusiveMaximum" if high == bounds.get("exclusiveMaximum") else "maximum"] = high
    return out


def _integer(bounds: dict[str, Any], multiple: int | None, path: str) -> Any:
    """Bounds as whole numbers that belong to the range."""
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    if lows and highs and max(lows) > min(highs):
        return False
    out: dict[str, Any] = {"type": "integer"}
    if lows:
        out["minimum"] = max(lows)
    if highs:
        out["maximum"] = min(highs)
    if multiple is not None and multiple != 1:
        if bounds:
            raise SchemaError(path, "'multipleOf' beside bounds is not supported")
        out["multipleOf"] = multiple
    return out


def of_array(words: dict[str, Any], path: str, inner: Inner) -> Any:
    prefix = [inner(item, f"prefixItems/{i}") for i, item in enumerate(words.get("prefixItems", []))]
    items = inner(words.get("items", True), "items")
    low, high = int(words.get("minItems", 0)), words.get("maxItems")
    if False in prefix:
        prefix, items = prefix[: prefix.index(False)], False
    most = len(prefix) if items is False else math.inf
    if high is not None:
        most = min(most, int(high))
    if low > most:
        return False
    if most <= len(prefix):
        prefix, items = prefix[: int(most)], False
    out: dict[str, Any] = {"type": "array", "items": items}
    if prefix:
        out["prefixItems"] = prefix
    if low:
        out["minItems"] = low
    if most < math.inf and items is not False:
        out["maxItems"] = int(most)
    elif items is False and not prefix:
        out = {"type": "array", "maxItems": 0, "items": {}}
    return out


def of_object(words: dict[str, Any], path: str, inner: Inner, is_open: bool = False) -> Any:
    """is_open: what it allows at least, where an object without `additionalProperties` may have any. Else such an
    object has the properties that are named."""
    if words.get("patternProperties") or words.get("propertyNames", True) not in (True, {}):
        return _patterned(words, path, inner)
    given = {name: inner(schema, f"properties/{name}") for name, schema in words.get("properties", {}).items()}
    required = list(dict.fromkeys(words.get("required", [])))
    absent = "additionalProperties" not in words
    additional = inner(words.get("additionalProperties", True), "additionalProperties")
    for name in required:
        if name not in given:
            given[name] = additional
        if given[name] is False:
            return False
    barred = [name for name, schema in given.items() if schema is False]
    if barred and not absent and additional is not False:
        raise SchemaError(path, f"the property {barred[0]!r} is barred while others are free: that is not supported")
    properties = {name: schema for name, schema in given.items() if schema is not False}
    if absent and (given or barred) and not is_open:
        additional = False
    escaped = [name for name in given if any(char < " " or char in '"\\' for char in name)]
    if escaped and additional is not False and not is_open:
        raise SchemaError(path, f"the property {escaped[0]!r}, which JSON escapes, is not supported beside free ones")
    out: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    out["additionalProperties"] = additional
    return out if is_open else _counted(out, words, path)


def _counted(out: dict[str, Any], words: dict[str, Any], path: str) -> Any:
    """minProperties and maxProperties, where the object's own properties do not settle them."""
    properties, closed = out["properties"], out["additionalProperties"] is False
    low, high = int(words.get("minProperties", 0)), words.get("maxProperties")
    if (high is not None and (low > high or len(out["required"]) > high)) or (closed and low > len(properties)):
        return False
    if low > len(out["required"]):
        if closed and low == len(properties):
            out["required"] = list(properties)
        elif low == 1 and not properties:
            out["minProperties"] = 1
        else:
            raise SchemaError(path, "'minProperties' is supported where it follows from 'required'")
    if high is not None and not (closed and high >= len(properties)):
        if properties:
            raise SchemaError(path, "'maxProperties' is supported for objects without named properties")
        out["maxProperties"] = int(high)
    return out


def _patterned(words: dict[str, Any], path: str, inner: Inner) -> Any:
    """An object whose keys follow one pattern."""
    patterns = dict(words.get("patternProperties", {}))
    names = words.get("propertyNames", True)
    for key in ("properties", "required", "minProperties", "maxProperties"):
        if words.get(key):
            which = "patternProperties" if patterns else "propertyNames"
            raise SchemaError(path, f"'{which}' beside {key!r} is not supported")
    if names is not True and names != {}:
        rest = {key: value for key, value in names.items() if key != "type"} if isinstance(names, dict) else {}
        if patterns or set(rest) != {"pattern"} or names.get("type", "string") != "string":
            raise SchemaError(path, "'propertyNames' is supported with one 'pattern' and without 'patternProperties'")
        patterns = {rest["pattern"]: words.get("additionalProperties", True)}
    if len(patterns) != 1:
        raise SchemaError(path, "'patternProperties' is supported with one pattern")
    ((pattern, schema),) = patterns.items()
    if not isinstance(pattern, str):
        raise SchemaError(path, "'pattern' must be a string")
    check_regex(pattern, path)
    value = inner(schema, "patternProperties")
    if value is False:
        return {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    return {"type": "object", "patternProperties": {pattern: value}, "additionalProperties": False}


def is_finite(schema: Any, finite: set[str]) -> bool:
    """Whether a normal schema has a finite value, given the references that are known to have one."""
    if schema is False:
        return False
    if "$ref" in schema:
        return schema["$ref"] in finite
    if "anyOf" in schema:
        return any(is_finite(branch, finite) for branch in schema["anyOf"])
    if schema.get("type") == "object":
        needed = [schema.get("properties", {})[name] for name in schema.get("required", [])]
        if schema.get("minProperties"):
            needed.append(schema["additionalProperties"])
        return all(is_finite(part, finite) for part in needed)
    if schema.get("type") == "array":
        prefix, low = schema.get("prefixItems", []), schema.get("minItems", 0)
        needed = prefix[:low] + ([schema["items"]] if low > len(prefix) else [])
        return all(is_finite(part, finite) for part in needed)
    return True
