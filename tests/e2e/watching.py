# SPDX-License-Identifier: MIT
"""A whole server under watch: its gauges, and streams that go on until they are ended."""

from __future__ import annotations

import re

import openai

from tests.support.server import Server


def gauge(server: Server, name: str) -> float:
    """The sum of a gauge over its label sets on /metrics."""
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+-]+)$", server.get_text("/metrics"), re.MULTILINE)
    assert values, f"{name} is not exported"
    return sum(float(value) for value in values)


def long_stream(client: openai.OpenAI, model: str, max_tokens: int = 900) -> openai.Stream:
    return client.completions.create(
        model=model,
        prompt="Count: one two three",
        max_tokens=max_tokens,
        temperature=1.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
