# SPDX-License-Identifier: MIT
"""Engines of two real ranks, each a process with half of a tiny model: the tokens of one rank, and what faults do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import python_environment
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.sampling import RequestError
from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.leader import Leader
from tokenspeed.engine.offline import Engine, RequestOutput
from tokenspeed.engine.testing import CONFIG, StartEngine

PROMPTS = [[5, 6, 7], list(range(3, 90)), [9] * 40, [5, 6, 7, 8], list(range(3, 90))]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 24, "logprobs": 3, "ignore_eos": True},
    {"temperature": 0.9, "top_p": 0.9, "seed": 4, "max_new_tokens": 24, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 1.0, "top_k": 9, "seed": 5, "max_new_tokens": 24, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}},
    {"temperature": 1.1, "seed": 6, "n": 3, "max_new_tokens": 16, "bad_token_ids": [[5], [6, 7]]},
    {"temperature": 0.8, "min_p": 0.05, "seed": 8, "max_new_tokens": 24, "min_new_tokens": 8},
]
SETTINGS: dict[str, Any] = {"chunked_prefill_size": 24, "max_num_seqs": 4}


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [[choice.token_ids for choice in output.choices] for output in outputs]


def scores(outputs: list[RequestOutput]) -> list[float]:
    choices = [choice for output in outputs for choice in output.choices]
    prompts = [entry for output in outputs for entry in output.prompt_logprobs or () if entry]
    return [entry.logprob for entry in (*(e for choice in choices for e in choice.logprobs or ()), *prompts)]


def follower(engine: Engine) -> subprocess.Popen[bytes]:
    assert engine._core is not None and isinstance(engine._core.ranks, Leader)
    process = engine._core.ranks._peers[0].process
    assert process is not None
    return process


@pytest.mark.parametrize("depth", [0, 1])
def test_two_ranks_draw_the_tokens_of_one(start_engine: StartEngine, depth: int) -> None:
    alone = start_engine(overlap_depth=depth, **SETTINGS)
    both = start_engine(overlap_depth=depth, tensor_parallel_size=2, **SETTINGS)
    for _ in range(2):  # cold, and from the cache
        one, two = alone.generate(PROMPTS, PARAMS), both.generate(PROMPTS, PARAMS)
        assert told(two) == told(one)
        assert scores(two) == pytest.approx(scores(one), abs=1e-4)
        assert [output.cached_tokens for output in two] == [output.cached_tokens for output in one]
    process = follower(both)
    both.shutdown()
    assert process.poll() == 0, "the other rank ends with the first"


def test_a_killed_rank_fails_what_runs_and_what_comes(start_engine: StartEngine) -> None:
    engine = start_engine(tensor_parallel_size=2)
    frontend, told_dead = engine.frontend, []
    job = engine.job([5, 6], {"max_new_tokens": 900, "ignore_eos": True})
    frontend.submit(job.requests, lambda item: told_dead.append(item) if isinstance(item, EngineDeadError) else None)
    follower(engine).kill()
    with pytest.raises(EngineDeadError, match=r"rank 1 ended \(signal 9\)"):
        engine.generate([[1, 2]], {"max_new_tokens": 900, "ignore_eos": True})
    assert len(told_dead) == 1, "once"
    with pytest.raises(EngineDeadError):
        engine.generate([[1, 2]], {"max_new_tokens": 2})


def test_a_rank_that_hangs_meets_the_deadline(start_engine: StartEngine) -> None:
    engine = start_engine(tensor_parallel_size=2, distributed_timeout_seconds=5)
    process = follower(engine)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineDeadError):
        engine.generate([[1, 2]], {"max_new_tokens": 900, "ignore_eos": True})
    engine.shutdown()
    assert process.poll() is not None


def test_the_other_rank_ends_with_a_first_one_that_is_killed(tiny_model: str, tmp_path: Path) -> None:
    code = (
        "import sys, time; from tokenspeed.engine.ranks_engine_test import follower\n"
        "from tokenspeed import Engine\n"
        "if __name__ == '__main__':\n"
        f"    engine = Engine({tiny_model!r}, load_format='dummy', device='cpu', skip_tokenizer_init=True,\n"
        "        max_total_tokens=4096, tensor_parallel_size=2)\n"
        "    print(follower(engine).pid, flush=True); time.sleep(600)\n"
    )
    script = tmp_path / "first.py"
    script.write_text(code)
    environment = python_environment()
    first = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert first.stdout is not None
    pid = int(first.stdout.readline())
    first.kill()
    first.wait()
    deadline_s = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline_s, "an orphan is left"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_ranks_cannot_do_is_refused_by_name(start_engine: StartEngine, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--tensor-parallel-size: 4 heads over 2 KV heads .* 3 ranks"):
        start_engine(tensor_parallel_size=3)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 1}))
    with pytest.raises(ModelError, match=r"size 1 is too small for 2 ranks; use another --tensor-parallel-size"):
        start_engine(model=str(tmp_path), tensor_parallel_size=2)
    engine = start_engine(tensor_parallel_size=2, enable_custom_logit_processor=True)
    with pytest.raises(RequestError, match="cannot be given to 2 ranks"):
        engine.generate([[1, 2]], {"logits_processor": lambda _ids, logits: logits})
    assert engine.generate([[1, 2]], {"max_new_tokens": 2})[0].finish_reason == "length"


def test_more_ranks_than_kv_heads_share_one(start_engine: StartEngine) -> None:
    alone, four = start_engine(), start_engine(tensor_parallel_size=4)
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    assert told(four.generate(PROMPTS, params)) == told(alone.generate(PROMPTS, params))
