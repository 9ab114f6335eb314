# SPDX-License-Identifier: MIT
"""The OpenAPI document is true: it names every path, the answers are what it says, and nothing that fits or breaks it
is answered with a 5xx."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import python_environment
from tokenspeed.gateway.operations import OPERATIONS, SCHEMAS
from tokenspeed.gateway.testing.fake_engine import replying
from tokenspeed.gateway.testing.running import RunningGateway, ids

_CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with RunningGateway([replying(ids("Paris"))], ["--max-payload-size", "1000000"]) as running:
        yield running


def test_every_path_is_described_and_every_reference_leads_somewhere(gateway: RunningGateway) -> None:
    status, document = gateway.get("/openapi.json")
    assert status == 200 and document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == set(OPERATIONS)
    schemas = document["components"]["schemas"]
    assert set(SCHEMAS) < set(schemas)

    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            value = list(value.values())
        if isinstance(value, list):
            for inner in value:
                yield from references(inner)

    assert {ref.rpartition("/")[2] for ref in references(document)} <= set(schemas)


def test_paths_that_a_gateway_does_not_have_are_not_described() -> None:
    with RunningGateway([], ["--history-backend", "none"], num_workers=1) as plain:
        assert not [path for path in plain.get("/openapi.json")[1]["paths"] if "responses" in path]


@pytest.mark.parametrize("seed", [1])
def test_schemathesis_finds_no_answer_that_is_a_5xx_or_not_as_described(
    gateway: RunningGateway, tmp_path: Path, seed: int
) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", gateway.url("/openapi.json"), f"--checks={_CHECKS}"]
    command += ["--phases=coverage,fuzzing", "--max-examples=8", f"--seed={seed}", "--generation-database=none"]
    # Workers come and go by other tests; here the one that answers stays.
    command += ["--exclude-path=/workers/{id}", "--request-timeout=20", "--no-color"]
    env = python_environment(HOME=str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
