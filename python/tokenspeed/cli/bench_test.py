# SPDX-License-Identifier: MIT
"""`ts bench serve`: workloads and arrival times, what a stream's lines tell, whole runs against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import lzma
import math
import os
import signal
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tokenspeed.cli import bench_command, bench_plot, bench_workloads, ts
from tokenspeed.cli.bench_plot import plot
from tokenspeed.cli.bench_report import percentile, summarize, table
from tokenspeed.cli.bench_requests import Outcome, Recorder
from tokenspeed.cli.bench_workloads import Lengths
from tokenspeed.cli.eval_command import Progress
from tokenspeed.cli.eval_server import ServerError
from tokenspeed.config.flags import FlagError
from tokenspeed.gateway.testing.serving import serving as running


def line(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n"


def said(text: str) -> bytes:
    return line(choices=[{"delta": {"content": text}}])


def answered(begin_s: float, times: list[float], tokens: int) -> Outcome:
    """An answer whose chunks came so many seconds after it was asked."""
    recorder = Recorder(begin_s)
    recorder.feed(line(choices=[{"delta": {"role": "assistant", "content": ""}}]), begin_s)
    for at_s in times:
        recorder.feed(said("x"), begin_s + at_s)
    recorder.feed(line(choices=[], usage={"prompt_tokens": 10, "completion_tokens": tokens}), begin_s + 99)
    recorder.feed(b"data: [DONE]\n", begin_s + 99)
    return recorder.outcome(begin_s + times[-1], "")


def test_known_delays_give_their_latencies() -> None:
    one = answered(100.0, [0.5, 0.75, 1.5], 5)
    assert (one.ttft_s, one.e2e_s, one.tpot_s, one.text, one.error) == (0.5, 1.5, 0.25, "xxx", "")
    two = answered(100.0, [0.25], 1)
    summary = summarize([one, two, Recorder(100.0).outcome(102.0, "refused")], [0, 50, 100], {})
    assert (summary["completed"], summary["failed"], summary["first_error"]) == (2, 1, "refused")
    assert (summary["p0_ttft_ms"], summary["p50_ttft_ms"], summary["p100_ttft_ms"]) == (250, 375, 500)
    assert (summary["mean_itl_ms"], summary["p0_itl_ms"], summary["p100_itl_ms"]) == (500, 250, 750)
    assert summary["median_tpot_ms"] == 250  # an answer of one token has none
    assert (summary["duration"], summary["total_output_tokens"], summary["output_throughput"]) == (2.0, 6, 3.0)
    assert summary["total_token_throughput"] == 13.0 and summary["request_goodput"] is None


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([float(n) for n in range(101)], 99) == 99.0
    assert percentile([7.0], 95) == 7.0


@pytest.mark.parametrize(
    ("goals", "good"),
    [({"ttft": 500}, 2), ({"ttft": 499}, 1), ({"tpot": 249}, 1), ({"e2el": 1500, "ttft": 500}, 2), ({"e2el": 200}, 0)],
)
def test_goodput_counts_requests_within_every_goal(goals: dict[str, float], good: int) -> None:
    outcomes = [answered(0.0, [0.5, 0.75, 1.5], 5), answered(0.0, [0.25], 1), Recorder(0.0).outcome(2.0, "refused")]
    assert summarize(outcomes, [50], goals)["request_goodput"] == good / 2.0


def test_chunks_stand_for_tokens_only_where_the_server_counts_none() -> None:
    recorder = Recorder(0.0)
    for word in ("a", "b"):
        recorder.feed(line(choices=[{"text": word, "finish_reason": None}]), 1.0)
    recorder.feed(line(choices=[{"text": "", "finish_reason": "stop"}]), 1.0)
    outcome = recorder.outcome(2.0, "")
    assert (outcome.output_tokens, outcome.counted, outcome.text, outcome.error) == (2, False, "ab", "")
    assert "1 answers came without usage" in table(summarize([outcome], [50], {}), [50])


def test_reasoning_and_tool_calls_are_output_but_no_text() -> None:
    recorder = Recorder(0.0)
    recorder.feed(line(choices=[{"delta": {"reasoning_content": "hm"}}]), 1.0)
    recorder.feed(line(choices=[{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}]), 3.0)
    outcome = recorder.outcome(3.0, "")
    assert (outcome.token_times, outcome.text, outcome.error) == ((1.0, 3.0), "", "")


def test_a_stream_that_breaks_off_or_says_nothing_failed() -> None:
    cut, empty = Recorder(0.0), Recorder(0.0)
    cut.feed(said("x"), 1.0)
    empty.feed(b": ping\n", 1.0)
    empty.feed(b"data: [DONE]\n", 1.0)
    assert cut.outcome(1.0, "").error == "the stream ended early"
    assert empty.outcome(1.0, "").error == "the answer has no output"
    for broken in (line(error={"message": "late"}), b"data: {\n", b"data: []\n"):
        with pytest.raises(ServerError, match="in the stream"):
            cut.feed(broken, 2.0)


LENGTHS = Lengths(10, 20, 0.5)


def test_random_prompts_keep_their_range_and_their_seed() -> None:
    sessions = bench_workloads.random_sessions(200, LENGTHS, 1)
    lengths = [len(session.turns[0].content.split()) for session in sessions]
    assert min(lengths) == 5 and max(lengths) == 15
    assert all(10 <= session.turns[0].max_tokens <= 30 for session in sessions)
    assert sessions == bench_workloads.random_sessions(200, LENGTHS, 1)
    assert sessions != bench_workloads.random_sessions(200, LENGTHS, 2)


def test_agents_share_a_system_prompt_and_count_turns() -> None:
    sessions = bench_workloads.agent_sessions(7, 3, 50, LENGTHS, 0)
    assert [len(session.turns) for session in sessions] == [3, 3, 1]
    assert len({session.system for session in sessions}) == 1 and len(sessions[0].system.split()) == 50
    assert len({turn.content for session in sessions for turn in session.turns}) == 7


def test_gaps_have_the_rates_mean_and_the_burstiness_variance() -> None:
    sessions = bench_workloads.random_sessions(4001, Lengths(1, 1, 0), 0)
    for burstiness in (0.25, 1.0, 4.0):
        at_s = bench_workloads.starts(sessions, 10.0, burstiness, 0)
        gaps = [late - early for early, late in itertools.pairwise(at_s)]
        assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
        assert statistics.pvariance(gaps) == pytest.approx(0.01 / burstiness, rel=0.2)
    assert set(bench_workloads.starts(sessions, math.inf, 1.0, 0)) == {0.0}


TRACE = [
    {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 2]},
]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_trace_keeps_its_times_lengths_and_shared_prefixes(tmp_path: Path, compressed: bool) -> None:
    raw = "\n".join(json.dumps(row) for row in TRACE).encode()
    path = tmp_path / ("trace.jsonl" + ".xz" * compressed)
    path.write_bytes(lzma.compress(raw) if compressed else raw)
    sessions = bench_workloads.trace_sessions(str(path), 2, 2.0)
    first, second = (session.turns[0].content.split() for session in sessions)
    assert (len(first), len(second)) == (700, 600)
    assert first[:512] == second[:512] and first[512:600] != second[512:600]
    assert [session.turns[0].max_tokens for session in sessions] == [3, 4]
    assert bench_workloads.starts(sessions, math.inf, 1.0, 0) == [0.0, 1.5]


CONVERSATIONS = [
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "one two three four"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"},
                  {"role": "assistant", "content": "so"}]},
    {"conversations": [{"from": "human", "value": "unanswered"}]},
]  # fmt: skip


def test_conversations_give_first_questions_and_the_length_of_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    path.write_text(json.dumps(CONVERSATIONS))
    turns = {turn for one in bench_workloads.shared_conversations(str(path), 2, None, 0) for turn in one.turns}
    assert {(turn.content, turn.max_tokens) for turn in turns} == {("Why?", 6), ("How?", 2)}
    assert [one.turns[0].max_tokens for one in bench_workloads.shared_conversations(str(path), 2, 9, 0)] == [9, 9]
    with pytest.raises(FlagError, match=r"--num-prompts: .* has 2 conversations"):
        bench_workloads.shared_conversations(str(path), 3, None, 0)


REFUSED = [
    ("--base-url localhost", "--base-url"),
    ("--workload dance", "--workload"),
    ("--num-prompts 0", "--num-prompts"),
    ("--max-concurrency 0", "--max-concurrency"),
    ("--request-rate 0", "--request-rate"),
    ("--request-rate nan", "--request-rate"),
    ("--burstiness -1", "--burstiness"),
    ("--range-ratio 1", "--range-ratio"),
    ("--percentiles 50,x", "--percentiles"),
    ("--percentiles 101", "--percentiles"),
    ("--goodput ttft", "--goodput"),
    ("--goodput ttft:5 speed:3", "--goodput"),
    ("--extra-body [1]", "--extra-body"),
    ("--workload trace", "--data"),
    ("--workload trace --data /no/such/file", "--data"),
    ("--workload trace --data x --request-rate 3", "--request-rate"),
    ("--workload sharegpt --data /no/such/file", "--data"),
    ("--num-turns 3", "--num-turns"),
    ("--json /no/such/folder/x", "--json"),
    ("--plot /no/such/folder/x", "--plot"),
    ("--dance 3", "--dance"),
    ("lonely", "--model"),
]


@pytest.mark.parametrize(("words", "flag"), REFUSED)
def test_a_wrong_command_line_is_one_line_that_names_the_flag(
    capsys: pytest.CaptureFixture[str], words: str, flag: str
) -> None:
    assert ts.main(["bench", "serve", *words.split()]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.startswith(f"ts bench serve: error: {flag}: ")


@pytest.mark.parametrize("row", ["{", "[]", "{}", json.dumps({**TRACE[0], "hash_ids": [0]})])
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, row: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(TRACE[0])}\n{row}\n")
    with pytest.raises(FlagError, match=f"--data: {path}:2: "):
        bench_workloads.trace_sessions(str(path), 2, 1.0)


def test_goals_may_follow_one_flag_or_several() -> None:
    for words in ("--goodput ttft:200 tpot:20 --seed 1", "--goodput ttft:200 --goodput tpot:20"):
        assert bench_command.make_flags(words.split())["goodput"] == {"ttft": 200.0, "tpot": 20.0}


class Server:
    """Answers chats and completions with `max_tokens` chunks; a prompt that holds `refuse` is refused."""

    def __init__(self, refuse: str) -> None:
        self.refuse = refuse
        self.bodies: list[dict[str, Any]] = []
        self.most_open = self._open = 0

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refuse and self.refuse in json.dumps(body):
            return web.json_response({"error": {"message": "too long"}}, status=400)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            chunk = {"delta": {"content": "y "}} if "messages" in body else {"text": "y "}
            await response.write(line(choices=[chunk]) + b"\n")
            await asyncio.sleep(0)
        await response.write(line(choices=[], usage={"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}))
        self._open -= 1
        await response.write(b"\ndata: [DONE]\n\n")
        return response


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
    app = web.Application()
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = server.answer
    app.add_routes([web.get("/v1/models", server.models), web.post("/v1/chat/completions", answer)])
    app.add_routes([web.post("/v1/completions", answer)])
    with running(app) as url:
        yield url


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_run_counts_what_the_server_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str], api: str) -> None:
    out, server = tmp_path / "bench.json", Server("")
    words = ["--num-prompts", "9", "--input-len", "5", "--output-len", "4", "--max-concurrency", "2", "--api", api]
    with serving(server) as url:
        more = ["--json", str(out), "--goodput", "e2el:60000", "--extra-body", '{"top_k": 3}', "--ignore-eos"]
        assert ts.main(["bench", "serve", "--base-url", f"{url}/v1", *words, *more]) == 0
    summary = json.loads(out.read_text())
    assert (summary["model"], summary["completed"], summary["failed"]) == ("scripted", 9, 0)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (63, 36)
    assert summary["request_goodput"] == summary["request_throughput"] > 0
    assert 0 < summary["p50_ttft_ms"] <= summary["p99_ttft_ms"] <= summary["p99_e2el_ms"]
    assert len(summary["requests"]) == 9 and all(len(row["token_times"]) == 4 for row in summary["requests"])
    assert server.most_open <= 2
    assert all(body["stream"] and body["top_k"] == 3 and body["ignore_eos"] for body in server.bodies)
    printed = capsys.readouterr()
    assert "request throughput" in printed.out and "ttft" in printed.out and "\r" not in printed.err


def test_agents_turns_grow_by_their_answers() -> None:
    server = Server("")
    words = "--workload agent --num-prompts 3 --num-turns 3 --input-len 4 --output-len 2 --system-len 6"
    with serving(server) as url:
        assert ts.main(["bench", "serve", "--base-url", url, *words.split()]) == 0
    first, second, third = (body["messages"] for body in server.bodies)
    assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert third[:4] == second and second[:2] == first and second[2]["content"] == "y y "


def test_failures_are_counted_with_the_turns_that_they_kept_from_being_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--workload agent --num-prompts 6 --num-turns 3 --input-len 4 --output-len 2 --system-len 0 --seed 5"
    sessions = bench_command.make_sessions(bench_command.make_flags(words.split()))
    server, out = Server(sessions[0].turns[1].content), tmp_path / "bench.json"
    with serving(server) as url:
        assert ts.main(["bench", "serve", "--base-url", url, *words.split(), "--json", str(out)]) == 1
    summary = json.loads(out.read_text())
    assert (summary["completed"], summary["failed"], len(server.bodies)) == (4, 2, 5)
    assert "HTTP 400" in summary["first_error"] and "too long" in summary["first_error"]
    assert "not sent" in summary["requests"][2]["error"] and "2 failed" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert ts.main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "http://127.0.0.1:9/v1/models" in err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    path = tmp_path / "x.png"
    assert ts.main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--plot", str(path)]) == 2
    assert "--plot: matplotlib is not installed" in capsys.readouterr().err and not path.exists()


def test_a_run_is_drawn_also_with_failures(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    server, words = Server("refuse me"), "--num-prompts 6 --input-len 3 --output-len 4"
    with serving(server) as url:
        assert ts.main(["bench", "serve", "--base-url", url, *words.split(), "--plot", str(path)]) == 0
    width, height = png_size(path)
    assert width >= 1000 and height >= 700 and path.stat().st_size > 20_000
    failed = [answered(0.0, [0.5], 1), Recorder(0.0).outcome(2.0, "refused")]
    plot(failed[1:], {**summarize(failed[1:], [50], {}), "model": "m"}, str(path))
    assert png_size(path) == (width, height)


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, of the header of a PNG."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_tokens_and_open_requests_lie_where_they_happened() -> None:
    outcomes = [answered(100.0, [0.5, 1.5], 4), answered(101.0, [0.25], 1)]
    assert bench_plot.throughput(outcomes, 100.0, 1.0, 2) == [2.0, 3.0]
    times, numbers = bench_plot.open_requests(outcomes, 100.0)
    assert list(zip(times, numbers, strict=True)) == [(0.0, 0), (0.0, 1), (1.0, 2), (1.25, 1), (1.5, 0)]
    widths = {bench_plot.bin_width_s(seconds) for seconds in (0.08, 0.9, 79.0, 81.0, 3600.0)}
    assert widths == {0.001, 0.02, 1.0, 2.0, 50.0}


def test_ctrl_c_tells_what_was_answered_until_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server("")
    count = Progress.count

    def interrupting(self: Progress, result: dict[str, Any]) -> None:
        count(self, result)
        if self.done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "count", interrupting)
    words = "--num-prompts 500 --input-len 3 --output-len 4 --max-concurrency 1"
    with serving(server) as url:
        assert ts.main(["bench", "serve", "--base-url", url, *words.split()]) == 130
    captured = capsys.readouterr()
    assert "request throughput" in captured.out and captured.err.startswith("ts bench serve: interrupted after ")


def test_help_names_the_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert ts.main(["bench", "serve", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in bench_command.WORKLOADS) and "--burstiness" in out
    assert ts.main(["bench"]) == 2 and "ts bench serve" in capsys.readouterr().err
