# SPDX-License-Identifier: MIT
"""One server with the embedded model for the whole folder; tests that stop or break a server start their own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.server import Server
from tokenspeed.gateway.testing.collector import Collector


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the server's spans go."""
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def server(collector: Collector) -> Iterator[Server]:
    flags = ["--max-model-len", "2048", "--max-num-seqs", "16", "--max-total-tokens", "16384"]
    with Server(*flags, "--enable-trace", "--otlp-traces-endpoint", collector.address) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="unused", max_retries=0, timeout=300)


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    """The served name, as `/v1/models` tells it."""
    return client.models.list().data[0].id
