# SPDX-License-Identifier: MIT
"""Schemas to their normal form, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenspeed.config.constraint import Constraint, ConstraintError
from tokenspeed.config.schema import SchemaError, check_regex, normal_schema
from tokenspeed.config.schema.regex import Repeat, Set, read_regex

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "normal"),
    [
        (True, {}),
        ({"title": "x", "x-mine": 1}, {}),
        ({"properties": {"a": {}}, "required": ["a"]}, closed({"a": {}}, ["a"])),
        ({"minimum": 2.5, "type": "integer"}, INTEGER | {"minimum": 3}),
        ({"exclusiveMaximum": 3, "type": "integer"}, INTEGER | {"maximum": 2}),
        ({"type": ["integer", "number"]}, {"type": "number"}),
        ({"type": ["string", "null"], "maxLength": 3}, {"anyOf": [STRING | {"maxLength": 3}, {"type": "null"}]}),
        ({"const": 3}, {"enum": [3]}),
        ({"enum": [1, "a", True, 1.5], "type": "integer"}, {"enum": [1]}),
        ({"enum": [1, 2], "const": 2}, {"enum": [2]}),
        ({"enum": ["a", None, True, 1], "type": ["string", "null", "boolean"]}, {"enum": ["a", None, True]}),
        (
            {"allOf": [{"enum": [1, True, [0], {"a": None}]}, {"enum": [[False], {"a": None}, 1.0]}]},
            {"enum": [1, {"a": None}]},
        ),
        ({"anyOf": [{"const": True}, {"const": 1}, {"const": 1.0}]}, {"anyOf": [{"enum": [True]}, {"enum": [1.0]}]}),
        ({"allOf": [{"minimum": 1}, {"maximum": 5}], "type": "integer"}, INTEGER | {"minimum": 1, "maximum": 5}),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "number"}]}, INTEGER),
        (
            {"anyOf": [{"type": "integer"}, {"minLength": 2}], "maximum": 5},
            {"anyOf": [INTEGER | {"maximum": 5}, STRING | {"minLength": 2}, {"type": "number", "maximum": 5}]},
        ),
        ({"anyOf": [INTEGER, STRING], "oneOf": [INTEGER, {"type": "null"}]}, INTEGER),
        (
            {"allOf": [{"anyOf": [INTEGER, STRING]}, {"anyOf": [STRING, {"type": "null"}]}], "minLength": 1},
            STRING | {"minLength": 1},
        ),
        ({"oneOf": [INTEGER, STRING]}, {"anyOf": [INTEGER, STRING]}),
        (
            {"oneOf": [{"properties": {name: {}}, "required": [name], "type": "object"} for name in "ab"]},
            {"anyOf": [closed({name: {}}, [name]) for name in "ab"]},
        ),
        (
            {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
            {"type": "array", "items": False, "prefixItems": [INTEGER, STRING]},
        ),
        ({"type": "array", "prefixItems": [INTEGER], "maxItems": 0}, {"type": "array", "items": {}, "maxItems": 0}),
        ({"type": "string", "format": "date"}, STRING | {"format": "date"}),
        ({"type": "string", "format": "colour"}, STRING),
        ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, {"$ref": "#/$defs/0", "$defs": {"0": INTEGER}}),
        ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": INTEGER}}, INTEGER | {"minimum": 1}),
        (
            {"type": "object", "propertyNames": {"pattern": "^k"}, "additionalProperties": INTEGER},
            {"type": "object", "patternProperties": {"^k": INTEGER}, "additionalProperties": False},
        ),
        (
            {"type": "object", "required": ["b"], "additionalProperties": INTEGER},
            closed({"b": INTEGER}, ["b"]) | {"additionalProperties": INTEGER},
        ),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_schemas_have_one_normal_form(schema: Any, normal: Any) -> None:
    assert normal_schema(json.loads(json.dumps(schema))) == normal


def test_recursive_schemas_keep_their_references() -> None:
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}, "required": ["kids"]}
    normal = normal_schema(tree)
    assert normal["properties"]["kids"]["items"] == {"$ref": "#/$defs/0"}
    assert normal["$defs"]["0"]["properties"]["kids"]["items"] == {"$ref": "#/$defs/0"}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "not-a-type"}, "type"),
        ({"type": []}, "type"),
        ([], "an object or a boolean"),
        ({"properties": []}, "properties"),
        ({"required": "a"}, "required"),
        ({"minLength": -1}, "minLength"),
        ({"minLength": 1e400}, "minLength"),
        ({"minimum": float("nan")}, "minimum"),
        ({"enum": []}, "enum"),
        ({"not": {"type": "string"}}, "'not'"),
        ({"if": True}, "'if'"),
        ({"uniqueItems": True}, "'uniqueItems'"),
        ({"items": {"contains": {}}}, "'contains'"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"unevaluatedProperties": False}, "'unevaluatedProperties'"),
        ({"properties": {"a": {"$dynamicRef": "#x"}}}, "'$dynamicRef'"),
        ({"type": "string", "nullable": True}, "'nullable'"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "'pattern' beside"),
        ({"pattern": "(?=a)b"}, "look-around"),
        ({"minProperties": 3, "type": "object"}, "'minProperties'"),
        ({"oneOf": [{"minimum": 1}, {"type": "integer"}]}, "'oneOf'"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "'pattern'"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "refers to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "string"}]}, "refers to itself"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite value"),
        ({"$ref": "http://example.com/x"}, "only references into the schema"),
        ({"$ref": "#/nowhere"}, "names nothing"),
        ({"items": {"$id": "http://example.com/x"}}, "'$id'"),
        # What one branch lets through would be valid under another as it is written: open, or of any type.
        ({"oneOf": [{}, INTEGER], "minLength": 1}, "'oneOf'"),
        ({"oneOf": [{"minLength": 5, "maxLength": 2}, INTEGER]}, "'oneOf'"),
        ({"oneOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}, "required": ["b"]}]}, "'oneOf'"),
        ({"properties": {'q"': {}}, "additionalProperties": INTEGER}, "JSON escapes"),
        ({"pattern": "a[^\\s\\S]"}, "no text"),
        (False, "no finite value"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no finite value"),
        ({"const": 3, "type": "string"}, "no finite value"),
        ({"allOf": [{"const": 1}, {"const": True}]}, "no finite value"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_kept_is_named(schema: Any, named: str) -> None:
    with pytest.raises(SchemaError) as caught:
        normal_schema(schema)
    assert named in str(caught.value)


def test_depth_and_size_are_bounded() -> None:
    deep: Any = {}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    with pytest.raises(SchemaError, match="deep"):
        normal_schema(deep)
    wide = {"anyOf": [{"type": "object", "properties": {str(i): {} for i in range(300)}} for _ in range(100)]}
    with pytest.raises(SchemaError, match="parts"):
        normal_schema(wide)


@pytest.mark.parametrize(
    "pattern", ["a", "^(|.*)$", r"[^\]a]b{2,3}?", r"\d+\.\d*|x", "(?:ab)+", "a{0,1000}", "^a$|^b$", "a]}", r"\cA\0[\b]"]
)
def test_regular_expressions_pass(pattern: str) -> None:
    check_regex(pattern, "#")


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("(a", "not closed"),
        ("a)", "not opened"),
        ("[a", "class is not closed"),
        ("*a", "nothing to repeat"),
        ("a**", "nothing to repeat"),
        ("a{3,2}", "ends before"),
        ("a{99999999}", "too large"),
        ("a{x}", "brace"),
        ("a\\", "backslash"),
        (r"(a)\1", "back-references"),
        (r"\bword", "anchor"),
        (r"\p{L}", "Unicode"),
        ("a^b", "anchor"),
        (r"a\|^b", "anchor"),
        ("[]a]", "read in two ways"),
        ("[[:alpha:]]", "POSIX"),
        (r"\h", "escape"),
        (r"\ud800", "no character"),
        (r"\x4", "hexadecimal"),
        (r"[^\s\S]|[]", "read in two ways"),
        (r"a[^\s\S]+", "no text"),
        ("(a$)b", "anchor"),
        ("(?<!a)b", "look-around"),
        ("(?i)a", "only (?: ) groups"),
        ("(" * 200 + "a" + ")" * 200, "deep"),
        ("a" * 20_000, "characters"),
    ],
    ids=lambda value: value[:20],
)
def test_other_regular_expressions_are_named(pattern: str, named: str) -> None:
    with pytest.raises(SchemaError) as caught:
        check_regex(pattern, "#")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        ("(a*)*b", "a*b"),
        ("(a{0,9}){0,10}", "a{0,90}"),
        ("(a?)+", "a*"),
        ("(a+)?", "a*"),
        ("(a{1,3}){2,4}", "a{2,12}"),
        ("(a{1,3}){0}", "a{0,0}"),
        ("(a{0}){5}", "a{0,0}"),
    ],
)
def test_a_count_of_counts_is_one_count(pattern: str, same: str) -> None:
    assert read_regex(pattern, "#") == read_regex(same, "#")


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (r"[\d-x]", ["1", "x1", "xb", "x" * 40, "x" * 40 + "z"]),
        (r"\cA", ["\x01"]),
        ("^a|b$", ["a", "xb", "ab"]),
        (r"^\D{2}$", ["日本", "xb", "ab"]),
        (r"(?:a?){9999999}b$", ["xb", "ab"]),
        # Python's own library takes hours for these.
        ("(x+x+)+y", []),
        ("(x*)*(x*)*z", ["x" * 40 + "z"]),
    ],
)
def test_values_of_an_enum_are_held_against_a_pattern_in_bounded_time(pattern: str, kept: list[str]) -> None:
    values = ["a", "1", "x1", "日本", "\x01", "xb", "ab", "x" * 40, "x" * 40 + "z"]
    schema = {"enum": [*values, 7], "pattern": pattern, "type": ["string", "integer"]}
    assert set(normal_schema(schema)["enum"]) == {7, *kept}
    assert set(normal_schema(schema | {"enum": [7, *kept]})["enum"]) == {7, *kept}


def test_a_pattern_that_takes_too_long_to_compare_is_named() -> None:
    with pytest.raises(SchemaError, match="takes too long to compare"):
        normal_schema({"enum": ["ab" * 50_000], "pattern": "(((a?b?)*c?)*d?)*e"})


@pytest.mark.parametrize("pattern", ["(a{2,3}){2}", "(a{9999}){9999}", "(a{0,9999999}){2}", "(ab*)*"])
def test_other_counts_of_counts_stay(pattern: str) -> None:
    found = read_regex(pattern, "#")
    assert isinstance(found, Repeat) and not isinstance(found.part, Set)


def test_a_constraint_behind_reasoning_is_a_structural_tag() -> None:
    prepared = Constraint("json_schema", '{"type":"integer","minimum":1.5}', "</think>").prepared()
    elements = json.loads(prepared.text)["format"]["elements"]
    assert (prepared.kind, prepared.reasoning_end) == ("structural_tag", None)
    assert elements[0]["end"] == "</think>" and elements[0]["content"] == {"type": "any_text"}
    assert elements[-1] == {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 2}}


def test_schemas_inside_a_structural_tag_are_checked_and_the_older_form_is_understood() -> None:
    def tag(schema: Any) -> str:
        return json.dumps({"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]})

    inner = json.loads(Constraint("structural_tag", tag({"const": 1}), None).prepared().text)["format"]
    assert inner["type"] == "triggered_tags" and inner["tags"][0]["content"]["json_schema"] == {"enum": [1]}
    with pytest.raises(ConstraintError, match="'not'") as caught:
        Constraint("structural_tag", tag({"not": {}}), None).prepared()
    assert caught.value.code == "invalid_structural_tag"


@pytest.mark.parametrize(
    ("kind", "text", "code"),
    [
        ("json_schema", "{", "invalid_schema"),
        ("json_schema", "", "invalid_schema"),
        ("json_schema", "[" * 100_000, "invalid_schema"),
        ("regex", "\ud800", "invalid_regex"),
        ("ebnf", "x" * 300_000, "invalid_grammar"),
        ("structural_tag", "[]", "invalid_structural_tag"),
        ("structural_tag", '{"format":{"type":"json_schema"}}', "invalid_structural_tag"),
        ("structural_tag", '{"format":{"type":"regex","pattern":5}}', "invalid_structural_tag"),
    ],
    ids=lambda value: value[:20],
)
def test_a_constraint_that_cannot_be_read_has_a_code(kind: str, text: str, code: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        Constraint(kind, text, None).prepared()
    assert caught.value.code == code


def test_long_lists_of_values_do_not_cost_their_square() -> None:
    many = [{"n": i} for i in range(20_000)]  # pairs of them would take minutes
    normal = normal_schema({"allOf": [{"enum": many}, {"enum": [*many[10_000:], 0]}]})
    assert normal == {"enum": many[10_000:]}
    branches = [{"const": value} for value in many[:9000]]
    assert len(normal_schema({"anyOf": branches})["anyOf"]) == len(branches)
    for schema, words in (
        ({"oneOf": branches}, "'oneOf' has 9000 branches"),
        ({"enum": many, "anyOf": branches}, "not supported"),
    ):
        with pytest.raises(SchemaError, match=words):
            normal_schema(schema)
