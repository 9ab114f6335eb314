# SPDX-License-Identifier: MIT
"""A model small enough to start an engine a test: random weights of a Llama with two layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tokenspeed.engine.offline import Engine
from tokenspeed.engine.testing import CONFIG

StartEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture
def start_engine(tiny_model: str) -> Iterator[StartEngine]:
    """`start_engine(**options)`: an engine on the tiny model, or on `model=`, that the test need not stop."""
    running: list[Engine] = []

    def start(**options: Any) -> Engine:
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "device": "cpu",
            "num_threads": 1,
            "skip_tokenizer_init": True,
            "max_num_seqs": 8,
            "max_total_tokens": 4096,
            "block_size": 16,
            "log_level": "error",
        }
        running.append(Engine(options.pop("model", tiny_model), **(defaults | options)))
        return running[-1]

    yield start
    for engine in running:
        engine.shutdown()
