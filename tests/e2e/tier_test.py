# SPDX-License-Identifier: MIT
"""Sessions that the device has no room for: their second turns come from the host, and say so."""

from __future__ import annotations

from typing import Any

from tests.support.server import Server

SESSIONS = [f"Session {number}. " + " ".join(f"item {number * i % 97}," for i in range(30)) for number in range(3)]
SMALL = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-total-tokens", "256", "--block-size", "16")


def turn(server: Server, prompt: str) -> tuple[Any, int]:
    """The choice with its log-probabilities, and how many tokens were cached."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "logprobs": 2, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"], details.get("cached_tokens", 0)


def test_second_turns_of_many_sessions_come_from_the_host_and_answer_alike(server: Server) -> None:
    with Server(*SMALL, "--kvstore-ratio", "6") as tiered:
        prompts = SESSIONS
        for _ in range(2):
            found = [turn(tiered, prompt) for prompt in prompts]
            assert [answer for answer, _ in found] == [turn(server, prompt)[0] for prompt in prompts]
            prompts = [f"{prompt}{answer[0]['text']} And then" for prompt, (answer, _) in zip(prompts, found)]
        assert min(cached for _, cached in found) >= 112, "whole blocks of the first turn"
