# SPDX-License-Identifier: MIT
"""JSON-Schema-Test-Suite, draft 2020-12, against constrained output.

Every group of the suite is either refused, by the name of a keyword, or its schema's grammar lets through no instance
that the suite calls invalid; and what the embedded model writes under it at temperature 1 is valid.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs
import pytest

from tokenspeed import Engine
from tokenspeed.config.constraint import Constraint, ConstraintError
from tokenspeed.engine.grammars import token_table
from tokenspeed.gateway.text.tokenizer import load_tokenizer
from tokenspeed.grammar import Matcher, load_backend

# A folder, or the files in it.
SUITE = os.environ.get("TOKENSPEED_JSON_SCHEMA_SUITE", "").split()
MODEL = Path(os.environ["TOKENSPEED_EMBEDDED_MODEL"])
pytestmark = pytest.mark.skipif(not SUITE, reason="TOKENSPEED_JSON_SCHEMA_SUITE names no files; Bazel sets it")

NUM_SAMPLED_GROUPS = 96


class Group(NamedTuple):
    name: str
    schema: Any
    tests: list[dict[str, Any]]

    @property
    def constraint(self) -> Constraint:
        return Constraint("json_schema", json.dumps(self.schema), None)


def groups() -> Iterator[Group]:
    files = [Path(entry) for entry in SUITE]
    for file in sorted(files[0].glob("*.json") if len(files) == 1 else files):
        for group in json.loads(file.read_text()):
            yield Group(f"{file.stem}: {group['description']}", group["schema"], group["tests"])


def supported() -> list[Group]:
    found = []
    for group in groups():
        try:
            group.constraint.prepared()
        except ConstraintError:
            continue
        found.append(group)
    return found


def lets_through(matcher: Matcher, tokens: list[int], eos: int) -> bool:
    return all(matcher.accept(token) for token in tokens) and matcher.accept(eos)


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_no_invalid_instance_is_let_through_and_most_valid_ones_are(name: str) -> None:
    tokenizer = load_tokenizer(MODEL)
    eos = min(tokenizer.facts.eos_ids)
    backend = load_backend(name, token_table(tokenizer, tokenizer.size, (eos,)), True)
    num_valid = num_let_through = 0
    for group in supported():
        compiled = backend.compile(group.constraint.prepared())
        for test in group.tests:
            text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
            passed = lets_through(compiled.matcher((eos,)), tokenizer.encode(text, add_special_tokens=False), eos)
            assert test["valid"] or not passed, f"{group.name}: {text} is invalid under {json.dumps(group.schema)}"
            num_valid += test["valid"]
            num_let_through += passed
    # Normal forms narrow: an inferred type, closed objects, the schema's order of properties.
    assert num_valid > 400 and num_let_through > 0.55 * num_valid, (num_let_through, num_valid)


def test_schemas_that_cannot_be_kept_are_refused_by_the_name_of_a_keyword() -> None:
    num_refused = 0
    for group in groups():
        try:
            group.constraint.prepared()
        except ConstraintError as error:
            num_refused += 1
            assert error.code == "invalid_schema"
            assert "'" in str(error) or "no finite value" in str(error), f"{group.name}: {error}"
            quoted = str(error).split("'")[1::2]
            named = [word for word in quoted if f'"{word}"' in json.dumps(group.schema)]
            assert named or "no finite value" in str(error), f"{group.name}: {error}"
    assert num_refused > 150


def test_what_the_model_writes_at_temperature_1_is_valid() -> None:
    chosen = supported()
    random.Random(0).shuffle(chosen)
    chosen = chosen[:NUM_SAMPLED_GROUPS]
    params = [
        {"temperature": 1.0, "seed": seed, "max_new_tokens": 48, "json_schema": group.constraint.text}
        for seed, group in enumerate(chosen)
    ]
    prompts = [f"A JSON value for the schema {json.dumps(group.schema)[:300]}:\n" for group in chosen]
    with Engine(max_num_seqs=32, max_total_tokens=32 * 512) as engine:
        outputs = engine.generate(prompts, params)
    num_whole = 0
    for group, output in zip(chosen, outputs, strict=True):
        if output.finish_reason == "length":
            continue  # cut, so no JSON
        num_whole += 1
        value = json.loads(output.text)
        schema = {**group.schema} if isinstance(group.schema, dict) else group.schema
        if isinstance(schema, dict):
            schema.pop("$schema", None)  # some name a dialect that only the suite's own server has
        assert jsonschema_rs.Draft202012Validator(schema).is_valid(value), f"{group.name}: {output.text}"
    assert num_whole > 0.5 * len(chosen), f"only {num_whole} of {len(chosen)} outputs came to their end"
