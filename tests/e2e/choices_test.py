# SPDX-License-Identifier: MIT
"""A multiple-choice set, scored through `/v1/completions` and by `transformers`: equal logprobs, equal answers."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.reference import load_reference, token_losses
from tests.support.server import Server


@dataclass(frozen=True)
class Question:
    text: str
    choices: tuple[str, ...]
    answer: int


QUESTIONS = (
    Question("What is the capital of Italy?", ("Rome", "Oslo", "Lima"), 0),
    Question("What do bees make?", ("honey", "cheese", "paper money"), 0),
    Question("Which of these is a mammal?", ("a trout", "a whale", "an eagle"), 1),
    Question("What is frozen water called?", ("steam", "sand", "ice"), 2),
    Question("Who wrote the play Romeo and Juliet?", ("William Shakespeare", "Isaac Newton", "Marie Curie"), 0),
    Question("In which direction does the sun rise?", ("the west", "the east", "the north"), 1),
    Question("Welche Farbe hat Schnee?", ("weiß", "grün", "schwarz"), 0),
    Question("ラーメンはどの国の料理ですか?", ("日本", "ブラジル", "フィンランド"), 0),
)


def context_of(question: Question) -> str:
    return f"Question: {question.text}\nAnswer:"


class Served:
    """Scores as a client of the server has them."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def prompt(self, text: str) -> tuple[list[int], list[float | None]]:
        """A prompt's token ids and their logprobs."""
        body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
        status, answer = self._server.post("/v1/completions", body | {"return_token_ids": True})
        assert status == 200, answer
        choice = answer["choices"][0]
        count = answer["usage"]["prompt_tokens"]
        return choice["prompt_token_ids"], choice["logprobs"]["token_logprobs"][:count]


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return load_reference(os.environ["TOKENSPEED_EMBEDDED_MODEL"])


@torch.inference_mode()
def test_a_set_of_choices_is_scored_as_transformers_scores_it(server: Server, reference: PreTrainedModel) -> None:
    served = Served(server)
    ours, theirs = [], []
    for question in QUESTIONS:
        start = len(served.prompt(context_of(question))[0])
        scores, wanted = [], []
        for choice in question.choices:
            token_ids, logprobs = served.prompt(f"{context_of(question)} {choice}")
            assert len(token_ids) == len(logprobs) > start
            scores.append(sum(value for value in logprobs[start:] if value is not None))
            wanted.append(-float(token_losses(reference, token_ids)[start - 1 :].sum()))
        assert scores == pytest.approx(wanted, abs=2e-3), question.text
        ours.append(scores.index(max(scores)) == question.answer)
        theirs.append(wanted.index(max(wanted)) == question.answer)
    assert ours == theirs
    # A model of this size knows most of it: the scores are of the right tokens.
    assert sum(ours) >= len(QUESTIONS) // 2
