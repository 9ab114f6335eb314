# SPDX-License-Identifier: MIT
"""`ts eval` with the embedded model: through a running server, and with a server of its own that it ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch

from tests.support.processes import python_environment
from tests.support.reference import load_reference
from tests.support.server import Server

ITEMS: list[dict[str, Any]] = [
    {"question": "What is the capital of France?", "choices": ["Paris", "Banana", "Tokyo"], "answer": "A"},
    {"question": "무엇이 짖습니까?", "choices": ["강아지", "구름"], "answer": 0},
]


def marked(mark: str) -> list[int]:
    """Processes, whoever their parent is by now, that inherited the mark."""
    found: list[int] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TOKENSPEED_TEST_MARK") == mark:
                found.append(process.pid)
    return found


def evaluate(folder: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, results by item) of the multiple-choice items above."""
    data, out = folder / "items.jsonl", folder / "out.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    mark = uuid.uuid4().hex
    env = python_environment(TOKENSPEED_TEST_MARK=mark)
    line = ["eval", "--task", "choice", "--data", str(data), "--out", str(out), "--json", *words]
    done = subprocess.run(
        [sys.executable, "-m", "tokenspeed.cli.ts", *line], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert marked(mark) == [], "what it started has ended with it"
    return json.loads(done.stdout), [json.loads(text) for text in out.read_text().splitlines()]


def test_choices_score_what_transformers_says_and_the_same_with_an_own_server_that_is_gone_afterwards(
    server: Server, client: openai.OpenAI, model: str, tmp_path: Path
) -> None:
    summary, results = evaluate(tmp_path, "--base-url", server.base_url)
    assert summary["scored"] == 2 and summary["failed"] == 0 and results[0]["correct"]
    reference = load_reference(os.environ["TOKENSPEED_EMBEDDED_MODEL"])

    def token_ids(prompt: str) -> list[int]:
        extra = {"return_token_ids": True}
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=1, extra_body=extra)
        return (answer.choices[0].model_extra or {})["prompt_token_ids"]

    context = f"Question: {ITEMS[0]['question']}\nAnswer:"
    start = len(token_ids(context))
    for choice, told in zip(ITEMS[0]["choices"], results[0]["logprobs"], strict=True):
        ids = token_ids(f"{context} {choice}")
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = sum(float(logprobs[place - 1, ids[place]]) for place in range(start, len(ids)))
        assert told == pytest.approx(wanted, abs=1e-3)
    own, again = evaluate(tmp_path, "--", "--max-model-len", "1024", "--max-total-tokens", "4096")
    assert (own["accuracy"], again) == (summary["accuracy"], results)
