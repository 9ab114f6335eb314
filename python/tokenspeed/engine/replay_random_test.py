# SPDX-License-Identifier: MIT
"""Random traffic over engines that play their decode steps back, and over ones that run them: the same to the bit.

A pool that holds little more than the longest request retracts others and resumes them, contexts grow from a few tokens
to the longest that is served, prompts hit the cache in the middle of a block, and rows come and go at every step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tokenspeed.engine.offline import Engine
from tokenspeed.models.testing import MODELS, SMALL
from tokenspeed_kernel.recording import Recorded

StartEngine = Callable[..., Engine]
MAX_LEN, VOCAB, ROWS = 300, 323, 5
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3, "token_ids_logprob": (3, VOCAB - 1)},
    {"frequency_penalty": 1.1, "repetition_penalty": 1.3},
    {"logit_bias": {5: 4.0, 7: -100.0}, "top_p": 0.7, "n": 2},
    {"allowed_token_ids": tuple(range(2, 60)), "bad_token_ids": ((5,), (6, 7)), "logprobs": 0},
]


def traffic(random: Random, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Two prompts of three begin alike."""
    shared = [random.randrange(3, VOCAB) for _ in range(MAX_LEN - 100)]
    found = []
    for _ in range(count):
        prompt = shared[: random.randrange(1, len(shared))] if random.random() < 0.67 else []
        prompt = prompt + [random.randrange(3, VOCAB) for _ in range(random.randrange(1, 9))]
        most = random.choice([1, 7, 60, 60, MAX_LEN - len(prompt)])
        drawn = {"temperature": random.choice([0.0, 1.3]), "seed": random.randrange(99)}
        ends = {"max_new_tokens": min(most, MAX_LEN - len(prompt)), "ignore_eos": random.random() < 0.8}
        found.append((prompt, {**drawn, **ends, **random.choice(KINDS)}))
    return found


def answers(engine: Engine, seed: int) -> list[Any]:
    """Of rounds of fewer requests than may run at once, as many, and more."""
    random, found = Random(seed), []
    for count in (2, ROWS, ROWS + 4):
        asked = traffic(random, count)
        with ThreadPoolExecutor(len(asked)) as pool:
            outputs = pool.map(lambda one: engine.generate([one[0]], one[1])[0], asked)
            found += [
                (choice.token_ids, choice.finish_reason, choice.logprobs)
                for output in outputs
                for choice in output.choices
            ]
    return found


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [*((name, "auto") for name in sorted(MODELS.keys() - {"gemma"})), ("dense", "fp8_e4m3")]
)
def test_random_traffic_is_answered_as_by_an_engine_that_runs_every_step(
    name: str, kv_dtype: str, start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays: list[int] = []
    play = Recorded.play

    def counted(recorded: Recorded) -> Any:
        plays.append(len(recorded))
        return play(recorded)

    monkeypatch.setattr(Recorded, "play", counted)
    config = {"vocab_size": VOCAB, "eos_token_id": 2, "max_position_embeddings": MAX_LEN}
    (tmp_path / "config.json").write_text(json.dumps(SMALL | MODELS[name] | config))
    options: dict[str, Any] = {
        "model": str(tmp_path),
        "max_num_seqs": ROWS,
        "max_total_tokens": MAX_LEN + 60,
        "kv_cache_dtype": kv_dtype,
        "num_threads": 2,
    }
    run, played = start_engine(enforce_eager=True, **options), start_engine(**options)
    expected = answers(run, len(name))
    assert not plays
    assert answers(played, len(name)) == expected and len(plays) > 100
