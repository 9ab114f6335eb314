# SPDX-License-Identifier: MIT
"""`ts eval`: what counts as an answer, what its programs may do, and whole runs against scripted servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tokenspeed.cli import eval_command, eval_server, eval_tasks, ts
from tokenspeed.cli._proc import Child
from tokenspeed.cli.eval_code import CodeLimits, run_program
from tokenspeed.cli.eval_tasks import Item
from tokenspeed.config.flags import FlagError
from tokenspeed.gateway.testing.fake_engine import Script, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.gateway.testing.serving import serving
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

SAMPLES = Path(__file__).with_name("testdata")
LIMITS = CodeLimits(timeout_s=10.0, memory_bytes=512 << 20)


def sample(task: str) -> str:
    return str(SAMPLES / f"{task}_sample.jsonl")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("So 3 apples.\n#### 1,234\nThat was 5 steps.", "1234"),
        ("it costs $12.50.", "12.50"),
        ("10-5 = 5", "5"),
        ("the change is -7", "-7"),
        ("it fell to -$3", "-3"),
        ("first 1,2 then 3,45", "45"),
        ("1,000,000 people", "1000000"),
        ("####", None),
        ("#### none, though 4 was near", "4"),
        ("no number", None),
    ],
)
def test_the_number_after_the_mark_or_else_the_last_one_is_the_answer(text: str, number: str | None) -> None:
    assert eval_tasks.final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "right"),
    [("It is 12", True), ("12.00", True), ("$12", True), ("12.5", False), ("", False), ("12\nQuestion: 13?", True)],
)
def test_numbers_match_by_value_and_a_made_up_next_question_is_ignored(text: str, right: bool) -> None:
    assert eval_tasks.number_is_right(Item("x", {"answer": "4 * 3\n#### 12"}), text) is right


def test_examples_are_shown_with_their_answers_and_never_scored() -> None:
    items = eval_tasks.read_items("choice", sample("choice"))
    shots, scored = eval_tasks.split_shots("choice", items, 1)
    assert [item.name for item in scored] == ["line 2"]
    assert eval_tasks.question_prompt("choice", shots, scored[0]) == (
        "Question: What colour is the sky on a clear day?\nAnswer: blue\n\nQuestion: Which animal barks?\nAnswer:"
    )


def test_accuracy_comes_with_the_standard_error_of_the_sample() -> None:
    share, stderr = eval_tasks.accuracy([True, False, True, True])
    assert share == 0.75 and stderr == pytest.approx(0.25)
    assert eval_tasks.accuracy([True]) == (1.0, None)


def test_a_completion_ends_at_the_first_stop() -> None:
    assert eval_tasks.cut_at("    return 1\n\ndef x():\nprint(1)", ("\nprint(", "\ndef ")) == "    return 1\n"
    assert eval_tasks.cut_at("abc", ("\n",)) == "abc"


def test_a_chat_answer_gives_its_code_block_behind_the_prompts_imports() -> None:
    item = Item("x", {"prompt": "import math\n\ndef f(x):\n", "test": "def check(c): pass", "entry_point": "f"})
    source = eval_tasks.program(item, "Sure:\n```python\ndef f(x):\n    return math.pi\n```\nDone.", chat=True)
    assert source.startswith("import math\n\n\ndef f(x):\n    return math.pi\n") and "Done" not in source
    assert source.endswith("\ncheck(f)\n")


def echoed(logprobs: list[float | None], offsets: list[int], num_prompt: int) -> dict[str, Any]:
    columns = {"token_logprobs": logprobs, "text_offset": offsets}
    return {"choices": [{"logprobs": columns}], "usage": {"prompt_tokens": num_prompt}}


def test_a_choice_scores_the_sum_of_its_own_tokens() -> None:
    # "Q: a" + " bc": the tokens are "Q", ": a", " b", "c"; the fifth was generated and does not count.
    answer = echoed([None, -9.0, -0.25, -1.5, -7.0], [0, 1, 4, 6, 7], 4)
    assert eval_tasks.continuation_logprob(answer, "Q: a") == -1.75


def test_a_token_over_the_boundary_belongs_to_the_choice() -> None:
    assert eval_tasks.continuation_logprob(echoed([None, -2.0, -0.5], [0, 3, 5], 3), "Q: a") == -2.5


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, echoed([None], [0], 3), echoed([], [], 0), {"choices": [{"logprobs": None}], "usage": {}}],
)
def test_an_answer_without_the_prompts_logprobs_is_no_score(answer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="logprobs of an echoed prompt"):
        eval_tasks.continuation_logprob(answer, "Q: a")


def test_the_first_of_equal_choices_is_chosen() -> None:
    assert eval_tasks.best_choice([-3.0, -1.0, -1.0]) == 1


BAD_LINES = [
    ("gsm8k", "{", "not JSON"),
    ("gsm8k", "[]", "not a JSON object"),
    ("gsm8k", '{"answer": "1"}', "question"),
    ("gsm8k", '{"question": "?", "answer": 4}', "answer"),
    ("gsm8k", '{"question": "?", "answer": "four"}', "answer"),
    ("humaneval", '{"task_id": "a", "prompt": "p", "entry_point": "f"}', "test"),
    ("humaneval", '{"task_id": "a", "prompt": "p", "test": "t", "entry_point": "f()"}', "entry_point"),
    ("choice", '{"question": "?", "choices": ["a"], "answer": 0}', "choices"),
    ("choice", '{"question": "?", "choices": ["a", "b"], "answer": 2}', "answer"),
    ("choice", '{"question": "?", "choices": ["a", "b"], "answer": "c"}', "answer"),
    ("choice", '{"question": "?", "choices": ["a", "b"], "answer": true}', "answer"),
]


@pytest.mark.parametrize(("task", "line", "named"), BAD_LINES)
def test_a_bad_line_is_named_with_its_file_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, line: str, named: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"\n{line}\n")
    assert ts.main(["eval", "--task", task, "--data", str(path), "--allow-code-execution"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and f"{path}:2: {named}" in err


REFUSED = [
    ("--data x", "--task"),
    ("--task gsm8k", "--data"),
    ("--task dance --data x", "--task"),
    ("--task gsm8k --data /no/such/file", "--data"),
    (f"--task gsm8k --data {sample('gsm8k')} --num-shots 4", "--num-shots"),
    (f"--task gsm8k --data {sample('gsm8k')} --num-shots -1", "--num-shots"),
    (f"--task gsm8k --data {sample('gsm8k')} --limit 0", "--limit"),
    (f"--task gsm8k --data {sample('gsm8k')} --concurrency 0", "--concurrency"),
    (f"--task gsm8k --data {sample('gsm8k')} --temperature nan", "--temperature"),
    (f"--task gsm8k --data {sample('gsm8k')} --timeout 0", "--timeout"),
    (f"--task gsm8k --data {sample('gsm8k')} --base-url localhost", "--base-url"),
    (f"--task gsm8k --data {sample('gsm8k')} --api-key k", "--api-key"),
    (f"--task gsm8k --data {sample('gsm8k')} --base-url http://x -- --seed 1", "--seed"),
    (f"--task gsm8k --data {sample('gsm8k')} --seed 1", "--seed"),
    (f"--task gsm8k --data {sample('gsm8k')} --base-url http://127.0.0.1:9 --out /no/such/folder/x", "--out"),
    (f"--task choice --data {sample('choice')} --api chat", "--api"),
    (f"--task humaneval --data {sample('humaneval')}", "--allow-code-execution"),
]


@pytest.mark.parametrize(("line", "flag"), REFUSED)
def test_a_wrong_command_line_is_refused_before_a_server_is_asked(line: str, flag: str) -> None:
    with pytest.raises(FlagError) as caught:
        eval_command.main(line.split())
    assert caught.value.flag == flag


def outcome(source: str, limits: CodeLimits = LIMITS) -> str:
    return asyncio.run(run_program(source, limits))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import math, typing\nassert math.gcd(4, 6) == 2\nprint('noise')", "passed"),
        ("assert 1 == 2, 'unequal'", "AssertionError: unequal"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "without a result"),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "PermissionError: socket."),
        ("import subprocess\nsubprocess.run(['true'])", "PermissionError: subprocess."),
        ("import os\nos.system('true')", "PermissionError: os.system"),
        ("with open('big', 'wb') as f:\n    f.write(bytes(1 << 25))", "OSError"),
        ("import os\nassert 'TOKENSPEED_SECRET' not in os.environ", "passed"),
    ],
)
def test_a_program_passes_only_by_reaching_its_end_within_its_limits(
    monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setenv("TOKENSPEED_SECRET", "x")
    assert said in outcome(source)


@pytest.mark.parametrize("source", ["while True: pass", "import time\ntime.sleep(60)"])
def test_an_endless_program_is_ended(source: str) -> None:
    assert outcome(source, CodeLimits(timeout_s=1.0, memory_bytes=512 << 20)) == "timed out"


def answering(answers: dict[str, str]) -> Script:
    """A worker that answers a prompt by the last question or function that stands in it."""

    def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        prompt = bytes(token - 3 for token in request.input_ids if token > 2).decode()
        found = max(answers, key=prompt.rfind)
        assert found in prompt
        return replying(ids(answers[found]), per_step=8)(request)

    return script


GSM8K = {"3 boxes": " 3 * 4 = 12\n#### 12", "5 plums": " She has 8.", "won": " That is 2,400.", "Ten birds": " 6"}


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_gsm8k_through_a_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str], api: str) -> None:
    out = tmp_path / "items.jsonl"
    with RunningGateway([answering(GSM8K)]) as gateway:
        line = ["eval", "--base-url", gateway.url("/v1"), "--task", "gsm8k", "--data", sample("gsm8k"), "--api", api]
        assert ts.main([*line, "--out", str(out)]) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith("gsm8k: accuracy 0.750 ± 0.250 (3 of 4), model ") and "\r" not in printed.err
        results = [json.loads(text) for text in out.read_text().splitlines()]
        assert [result["correct"] for result in results] == [True, False, True, True]
        assert [result["extracted"] for result in results] == ["12", "8", "2400", "6"]
        assert ts.main([*line, "--num-shots", "1", "--limit", "2", "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["correct"], summary["scored"], summary["accuracy"]) == (1, 2, 0.5)
        assert all(request.sampling_params.top_k == 1 for request in gateway.engines[0].seen.requests)


def test_humaneval_through_a_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"def double": "    return 2 * x\n\ndef more():\n    oops(", "def largest": "    return xs[0]\n"}
    with RunningGateway([answering(answers)]) as gateway:
        line = ["eval", "--base-url", gateway.url(""), "--task", "humaneval", "--data", sample("humaneval"), "--json"]
        assert ts.main([*line, "--allow-code-execution"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["correct"], summary["scored"], summary["accuracy"]) == (1, 2, 0.5)


@contextlib.contextmanager
def completions_server(logprobs: dict[str, list[float]]) -> Iterator[str]:
    """A server that answers echoed prompts with one token for the context and the given ones for each choice."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["echo"] and body["logprobs"] and body["model"] == "scripted"
        choice = next(text for text in logprobs if body["prompt"].endswith(f"Answer: {text}"))
        start = len(body["prompt"]) - len(choice) - 1
        own = logprobs[choice]
        if not own:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        offsets = [0, *range(start, start + len(own)), len(body["prompt"])]
        # The last column is the generated token, likely enough to spoil a sum that took it in.
        return web.json_response(echoed([None, *own, -99.0], offsets, 1 + len(own)))

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    with serving(app) as url:
        yield url


def test_choices_are_compared_by_the_sums_of_their_logprobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logprobs = {"blue": [-1.0, -0.5], "plaid": [-2.0], "a spoon": [-1.0], "a dog": [-0.5, -0.75], "a cloud": [-4.0]}
    out = tmp_path / "items.jsonl"
    with completions_server(logprobs) as url:
        line = ["eval", "--base-url", url, "--task", "choice", "--data", sample("choice"), "--out", str(out)]
        assert ts.main(line) == 0
    assert capsys.readouterr().out == "choice: accuracy 0.500 ± 0.500 (1 of 2), model scripted\n"
    first, second = (json.loads(text) for text in out.read_text().splitlines())
    assert first == {"name": "line 1", "correct": True, "chosen": 0, "logprobs": [-1.5, -2.0]}
    assert second == {"name": "line 2", "correct": False, "chosen": 0, "logprobs": [-1.0, -1.25, -4.0]}


def test_a_failed_request_is_reported_and_not_counted_as_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    logprobs = {"blue": [-1.0], "plaid": [-2.0], "a spoon": [], "a dog": [], "a cloud": []}
    with completions_server(logprobs) as url:
        assert ts.main(["eval", "--base-url", url, "--task", "choice", "--data", sample("choice")]) == 1
    out = capsys.readouterr().out
    assert "accuracy 1.000 (1 of 1)" in out and "; 1 failed" in out and "line 2" in out and "too long" in out


def test_a_server_that_is_not_there_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["eval", "--base-url", "http://127.0.0.1:9", "--task", "gsm8k", "--data", sample("gsm8k")]
    assert ts.main(line) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "http://127.0.0.1:9/v1/models" in err


def test_an_own_server_that_does_not_start_tells_why_and_gives_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert ts.main(["eval", "/no/such/model", "--task", "gsm8k", "--data", sample("gsm8k")]) == 2
    err = capsys.readouterr().err
    assert "[serve] ts serve: error: " in err and "/no/such/model" in err
    assert "ended before it was ready: exit status 2" in err


def test_an_own_server_that_is_never_ready_is_ended_by_its_process_id(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    class Sleeper(Child):
        """A child that does not listen."""

        def __init__(self, tag: str, _: list[str], out: Any) -> None:
            super().__init__(tag, ["-c", "import time; time.sleep(600)"], out)
            pids.append(self.pid)

    monkeypatch.setattr(eval_server, "Child", Sleeper)
    with pytest.raises(eval_server.ServerError, match="not ready within"), eval_server.own_server(None, [], 0.5):
        pass
    assert not Path(f"/proc/{pids[0]}").exists()


def test_the_bar_is_for_terminals_alone() -> None:
    code = (
        "import sys; from tokenspeed.cli.eval_command import Progress; sys.stderr.isatty = lambda: sys.argv[1] == 'y'\n"
        "bar = Progress(2, sys.stderr, 'right'); bar.count({'correct': True}); bar.count({'error': 'x'}); bar.close()"
    )
    said = {
        word: subprocess.run(
            [sys.executable, "-c", code, word], capture_output=True, env={"PYTHONPATH": ":".join(sys.path)}
        )
        for word in "yn"
    }
    assert b"2/2, 1 right" in said["y"].stderr and said["n"].stderr == b""


def test_help_names_the_tasks_and_the_danger(capsys: pytest.CaptureFixture[str]) -> None:
    assert ts.main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    assert "not a security boundary" in out and "humaneval" in out and "--num-shots" in out
