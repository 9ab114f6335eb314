# SPDX-License-Identifier: MIT
"""A JSON schema (draft 2020-12) to its normal form: what remains means exactly what a grammar compiler makes of it.

The gateway and the engine both call `normal_schema`: the first to answer 400 by name before anything runs, the second
to hand compilers a schema without their blind spots. In normal form every schema is False or one of {}, {"$ref"},
{"anyOf"}, {"enum"}, or one "type" with keywords of that type; allOf is merged, a missing type is inferred from the
keywords, and objects without `additionalProperties` are closed. Each step keeps or narrows what is valid, so what a
grammar lets through is valid under the client's schema. What cannot be kept is a `SchemaError` naming the keyword.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from tokenspeed.config.schema import shapes
from tokenspeed.config.schema.error import SchemaError
from tokenspeed.config.schema.merge import merged
from tokenspeed.config.schema.values import disjoint, identity, those_that_hold
from tokenspeed.config.schema.words import MAX_DEPTH, MAX_NODES, TYPES, check_words, types_of

_MAX_ONE_OF = 256
"""Branches of a oneOf, which are compared pair by pair."""
_MAX_PAIRS = 1_000_000
"""Values of an enum times alternatives beside it."""


def normal_schema(schema: Any) -> dict[str, Any]:
    """The normal form of a decoded schema, with the targets of references under "$defs". Raises `SchemaError`."""
    work = _Normaliser(schema)
    root = work.of(schema, "#", 0)
    work.finish_references()
    if root is False or not work.is_finite(root):
        raise SchemaError("#", "no finite value satisfies the schema")
    defs = {name.rpartition("/")[2]: body for name, body in work.defs.items() if name.startswith("#/$defs/")}
    return {**root, "$defs": defs} if defs else root


class _Definitions(dict[str, Any]):
    """Targets of references; one that is being normalised cannot be asked about its values yet."""

    def __missing__(self, name: str) -> Any:
        raise SchemaError(name, "'oneOf', 'enum' or 'const' over a reference that contains it is not supported")


class _Normaliser:
    """defs: where the targets of references go, each under the name that begins with `prefix`. wide: forms that hold at
    least what the client's schema does, where others hold at most that; for `oneOf` to tell its branches apart."""

    def __init__(
        self, root: Any, defs: _Definitions | None = None, prefix: str = "#/$defs/", wide: bool = False
    ) -> None:
        self._root = root
        self._prefix = prefix
        self._wide = wide
        self._names: dict[str, str] = {}
        """JSON pointer of a target -> "#/$defs/<n>"."""
        self._pending: list[str] = []
        self._num_nodes = 0
        self._wide_one: _Normaliser | None = None
        self.defs = _Definitions() if defs is None else defs

    def of(self, schema: Any, path: str, depth: int) -> Any:
        """The normal form of one schema."""
        self._num_nodes += 1
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"schemas are nested more than {MAX_DEPTH} deep")
        if self._num_nodes > MAX_NODES:
            raise SchemaError(path, f"the schema has more than {MAX_NODES} parts")
        if isinstance(schema, bool):
            return {} if schema else False
        words = check_words(schema, path, path == "#")
        if set(words) == {"$ref"}:
            return {"$ref": self._name(words["$ref"], path)}
        if "$ref" in words:
            target = self._resolve(words.pop("$ref"), path)
            return self.of(merged(target, words, path), path, depth + 1)
        for key in ("anyOf", "oneOf"):
            if key in words:
                return self._choice(key, words, path, depth)
        if "allOf" in words:
            return self._all_of(words, path, depth)
        if "enum" in words:
            return self._enum(words, path, depth)
        names = types_of(words)
        if self._wide and names and "type" not in words:
            names = [name for name in TYPES if name != "integer"]
        branches = [self._typed(name, words, path, depth) for name in names]
        return self._any_of(branches) if branches else {}

    def _all_of(self, words: dict[str, Any], path: str, depth: int) -> Any:
        parts = words.pop("allOf")
        whole: Any = words
        for index, part in enumerate(parts):
            part = part if isinstance(part, bool) else check_words(part, f"{path}/allOf/{index}", False)
            if not isinstance(part, bool) and "$ref" in part:
                beside = {key: value for key, value in part.items() if key != "$ref"}
                part = merged(self._resolve(part["$ref"], path), beside, path)
            whole = merged(whole, part, path)
        return self.of(whole, path, depth + 1)

    def _choice(self, key: str, words: dict[str, Any], path: str, depth: int) -> Any:
        branches: list[tuple[Any, Any]] = []
        parts = words.pop(key)
        if len(words.get("enum", ())) * len(parts) > _MAX_PAIRS:
            raise SchemaError(path, f"'enum' beside {len(parts)} alternatives is not supported")
        for index, part in enumerate(parts):
            part = part if isinstance(part, bool) else check_words(part, f"{path}/{key}/{index}", False)
            part = merged(part, words, path)
            branches.append((part, self.of(part, f"{path}/{key}/{index}", depth + 1)))
        if key == "oneOf" and len(branches) > 1 and not self._wide:
            self._check_one_of(branches, path, depth)
        return self._any_of([branch for _, branch in branches])

    def _check_one_of(self, branches: list[tuple[Any, Any]], path: str, depth: int) -> None:
        """That what one branch lets through is valid under no other as the client wrote it. A branch: its keywords, and
        its normal form."""
        if len(branches) > _MAX_ONE_OF:
            raise SchemaError(path, f"'oneOf' has {len(branches)} branches, at most {_MAX_ONE_OF}; use 'anyOf'")
        if self._wide_one is None:
            self._wide_one = _Normaliser(self._root, self.defs, "#/wide/", wide=True)
        wide = [self._wide_one.of(part, path, depth + 1) for part, _ in branches]
        self.finish_references()
        self._wide_one.finish_references()
        for i, (_, branch) in enumerate(branches):
            if not all(disjoint(branch, other, self.defs) for j, other in enumerate(wide) if i != j):
                raise SchemaError(path, "'oneOf' is supported where at most one branch can hold; use 'anyOf'")

    def _any_of(self, branches: list[Any]) -> Any:
        alternatives = [inner for branch in branches if branch is not False for inner in branch.get("anyOf", [branch])]
        flat = list({identity(inner): inner for inner in alternatives}.values())
        if not flat:
            return False
        if {} in flat:
            return {}
        return flat[0] if len(flat) == 1 else {"anyOf": flat}

    def _enum(self, words: dict[str, Any], path: str, depth: int) -> Any:
        values = words.pop("enum")
        rest = self.of(words, path, depth + 1)
        self.finish_references()
        values = those_that_hold(rest, values, self.defs)
        return {"enum": values} if values else False

    def _typed(self, name: str, words: dict[str, Any], path: str, depth: int) -> Any:
        def inner(schema: Any, where: str) -> Any:
            return self.of(schema, f"{path}/{where}", depth + 1)

        if name == "object":
            return shapes.of_object(words, path, inner, self._wide)
        if name == "array":
            return shapes.of_array(words, path, inner)
        if name == "string":
            return shapes.of_string(words, path)
        return shapes.of_number(name, words, path) if name in ("number", "integer") else {"type": name}

    # ---- references ------------------------------------------------------------------------------------------

    def _name(self, pointer: str, path: str) -> str:
        self._resolve(pointer, path)
        if pointer not in self._names:
            self._names[pointer] = f"{self._prefix}{len(self._names)}"
            self._pending.append(pointer)
        return self._names[pointer]

    def finish_references(self) -> None:
        """Normalise what has been referred to, and what that refers to."""
        while self._pending:
            pointer = self._pending.pop()
            name = self._names[pointer]
            body = self.of(self._resolve(pointer, pointer), pointer if pointer != "#" else "#/", 1)
            self.defs[name] = body

    def _resolve(self, pointer: str, path: str) -> Any:
        """The schema that a chain of lone references ends at."""
        seen = []
        while True:
            if pointer in seen:
                raise SchemaError(path, f"'$ref' {pointer!r} refers to itself")
            seen.append(pointer)
            target = _at(self._root, pointer, path)
            if isinstance(target, dict) and set(target) == {"$ref"} and isinstance(target["$ref"], str):
                pointer = target["$ref"]
                continue
            return target if isinstance(target, bool) else check_words(target, pointer, pointer == "#")

    # ---- finiteness ------------------------------------------------------------------------------------------

    def is_finite(self, root: Any) -> bool:
        """Whether the root has a finite value, by growing the set of definitions that have one; and no definition is
        itself through references and choices alone, which adds nothing and makes parsers go in circles."""
        for name in self.defs:
            if name in self._same_level(name):
                raise SchemaError(name, "'$ref' refers to itself and adds nothing")
        finite: set[str] = set()
        while True:
            more = {name for name, body in self.defs.items() if name not in finite and shapes.is_finite(body, finite)}
            if not more:
                return shapes.is_finite(root, finite)
            finite |= more

    def _same_level(self, name: str) -> set[str]:
        """Definitions that `name` may stand for without any bracket in between."""
        found: set[str] = set()
        todo = [self.defs[name]]
        while todo:
            schema = todo.pop()
            if schema is False:
                continue
            todo += schema.get("anyOf", [])
            target = schema.get("$ref")
            if target is not None and target not in found:
                found.add(target)
                todo.append(self.defs[target])
        return found


def _at(root: Any, pointer: str, path: str) -> Any:
    """What a JSON pointer in a fragment (RFC 6901) names."""
    if pointer != "#" and not pointer.startswith("#/"):
        raise SchemaError(path, f"'$ref' {pointer!r}: only references into the schema itself (#/...) are supported")
    here = root
    for part in pointer[2:].split("/") if pointer != "#" else []:
        part = _unescaped(part)
        if isinstance(here, list) and part.isdecimal() and int(part) < len(here):
            here = here[int(part)]
        elif isinstance(here, dict) and part in here:
            here = here[part]
        else:
            raise SchemaError(path, f"'$ref' {pointer!r} names nothing in the schema")
    return here


def _unescaped(part: str) -> str:
    return unquote(part).replace("~1", "/").replace("~0", "~")
