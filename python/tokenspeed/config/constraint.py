# SPDX-License-Identifier: MIT
"""What a request's output is constrained to: a JSON schema, a regular expression, an EBNF grammar, a structural tag.

Pure. The gateway checks a constraint to answer 400 before anything runs; the engine prepares it for a compiler: JSON
schemas in normal form, and, where the model reasons first, a structural tag that leaves the text before the marker
free. Structural tags are JSON as xgrammar documents them ({"type": "structural_tag", "format": ...}) or in the older
form with structures and triggers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenspeed.config.schema import SchemaError, check_regex, normal_schema

KINDS = ("json_schema", "regex", "ebnf", "structural_tag")
MAX_CONSTRAINT_CHARS = 262_144
_MAX_TAG_DEPTH = 50
ANY_OBJECT = '{"type":"object"}'
"""The schema of response_format json_object."""


class ConstraintError(ValueError):
    """A constraint that cannot be: `code` is machine-readable, the text names what is wrong and where."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Constraint:
    """`kind` is one of KINDS. reasoning_end: text up to whose first appearance the output is free."""

    kind: str
    text: str
    reasoning_end: str | None

    def prepared(self) -> Constraint:
        """As compilers take it, without `reasoning_end`. Raises `ConstraintError`. O(size of the text)."""
        if not self.text:
            raise self._error("it is empty")
        if len(self.text) > MAX_CONSTRAINT_CHARS:
            raise self._error(f"it has {len(self.text)} characters, at most {MAX_CONSTRAINT_CHARS}")
        try:
            self.text.encode()
            text = self._normal_text()
        except SchemaError as error:
            raise self._error(str(error)) from None
        except (RecursionError, ValueError) as error:
            raise self._error(f"it cannot be read: {error}") from None
        if self.reasoning_end is None:
            return Constraint(self.kind, text, None)
        return Constraint("structural_tag", _after(self.reasoning_end, self.kind, text), None)

    def _error(self, message: str) -> ConstraintError:
        name = {"json_schema": "schema", "ebnf": "grammar"}.get(self.kind, self.kind)
        return ConstraintError(f"invalid_{name}", message)

    def _normal_text(self) -> str:
        if self.kind == "json_schema":
            return _dumped(normal_schema(json.loads(self.text)))
        if self.kind == "structural_tag":
            return _dumped({"type": "structural_tag", "format": _format(_tag_format(json.loads(self.text)), "#", 0)})
        if self.kind == "regex":
            check_regex(self.text, "#")
        return self.text


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _after(marker: str, kind: str, text: str) -> str:
    """A structural tag: free text up to `marker`, then what is constrained."""
    free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": marker}
    # Models write a blank line between their reasoning and a JSON text; other kinds are matched to the letter.
    gap = [{"type": "regex", "pattern": "[ \\n]{0,4}"}] if kind == "json_schema" else []
    return _dumped(
        {"type": "structural_tag", "format": {"type": "sequence", "elements": [free, *gap, _element(kind, text)]}}
    )


def _element(kind: str, text: str) -> dict[str, Any]:
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": json.loads(text)}
    if kind == "regex":
        return {"type": "regex", "pattern": text}
    if kind == "ebnf":
        return {"type": "grammar", "grammar": text}
    inner: dict[str, Any] = json.loads(text)["format"]
    return inner


def _tag_format(tag: Any) -> Any:
    """The format of a structural tag, the older form translated."""
    if not isinstance(tag, dict):
        raise SchemaError("#", "a structural tag is a JSON object")
    if "format" in tag:
        return tag["format"]
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise SchemaError("#", "a structural tag has a 'format', or 'structures' and 'triggers'")
    tags = []
    for index, item in enumerate(structures):
        if not isinstance(item, dict) or not {"begin", "schema", "end"} <= item.keys():
            raise SchemaError(f"#/structures/{index}", "it needs 'begin', 'schema' and 'end'")
        content = {"type": "json_schema", "json_schema": item["schema"]}
        tags.append({"type": "tag", "begin": item["begin"], "content": content, "end": item["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _format(part: Any, path: str, depth: int) -> Any:
    """The same format with its schemas in normal form and its patterns checked."""
    if depth > _MAX_TAG_DEPTH:
        raise SchemaError(path, f"formats are nested more than {_MAX_TAG_DEPTH} deep")
    if isinstance(part, list):
        return [_format(item, f"{path}/{i}", depth + 1) for i, item in enumerate(part)]
    if not isinstance(part, dict):
        return part
    needed = {"json_schema": "json_schema", "regex": "pattern"}.get(str(part.get("type")))
    if needed is not None and needed not in part:
        raise SchemaError(path, f"a format of the type {part['type']!r} has a {needed!r}")
    if needed == "json_schema":
        try:
            return {**part, "json_schema": normal_schema(part["json_schema"])}
        except SchemaError as error:
            raise SchemaError(f"{path}/json_schema", str(error)) from None
    if needed == "pattern":
        if not isinstance(part["pattern"], str):
            raise SchemaError(path, "the 'pattern' of a format is a string")
        check_regex(part["pattern"], path)
    return {key: _format(value, f"{path}/{key}", depth + 1) for key, value in part.items()}
