# SPDX-License-Identifier: MIT
"""`ts bench serve`: load a running OpenAI-compatible server with streamed requests and tell how long they took.

Checks every flag and the workload's file first, then sends at the times that the rate or the trace gives, and prints
one table. The exit status is 1 when a request failed. Runs on the main thread with an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from tokenspeed.cli import bench_workloads
from tokenspeed.cli.bench_plot import can_plot, plot
from tokenspeed.cli.bench_report import summarize, table
from tokenspeed.cli.bench_requests import Outcome, Sender, run_sessions
from tokenspeed.cli.bench_workloads import Lengths, Session
from tokenspeed.cli.errors import INTERRUPTED
from tokenspeed.cli.eval_command import Progress
from tokenspeed.cli.eval_server import Client, ServerError
from tokenspeed.config.flags import Flag, FlagError, json_object, parse_flags
from tokenspeed.config.flags_help import help_text

WORKLOADS = ("random", "sharegpt", "agent", "trace")
_RUN, _LOAD, _REPORT = "server", "workload", "report"
FLAGS = (
    Flag(("--base-url",), "str", "http://127.0.0.1:8000", "the server", _RUN),
    Flag(("--model",), "str", None, "the name in requests; without it the first that the server lists", _RUN),
    Flag(("--api-key",), "str", None, "sent as a bearer token", _RUN),
    Flag(("--api",), "str", "chat", "which endpoint is asked", _RUN, choices=("chat", "completions")),
    Flag(("--timeout",), "float", 600.0, "seconds for one request", _RUN),
    Flag(("--extra-body",), "str", None, "a JSON object of further fields of every request", _RUN),
    Flag(("--ignore-eos",), "switch", False, "ask for answers of full length (not a field of OpenAI's)", _RUN),
    Flag(("--workload", "--dataset-name"), "str", "random", "what is asked", _LOAD, choices=WORKLOADS),
    Flag(("--data", "--dataset-path"), "str", None, "the file of sharegpt and trace", _LOAD),
    Flag(("--num-prompts",), "int", 100, "requests in all; of agent, turns", _LOAD),
    Flag(("--input-len",), "int", 512, "words of a prompt of random, of a turn of agent", _LOAD),
    Flag(("--output-len",), "int", None, "tokens of an answer; without it 128, or what the file says", _LOAD),
    Flag(("--range-ratio",), "float", 0.0, "lengths are drawn from 1 - x to 1 + x times the mean", _LOAD),
    Flag(("--num-turns",), "int", 8, "turns of a session of agent, each asked after the answer to the last", _LOAD),
    Flag(("--system-len",), "int", 1024, "words of the system prompt that agent's sessions share", _LOAD),
    Flag(("--trace-speed",), "float", 1.0, "replay a trace so many times as fast", _LOAD),
    Flag(("--request-rate",), "float", math.inf, "requests (of agent, sessions) begun per second", _LOAD),
    Flag(("--burstiness",), "float", 1.0, "shape of the gamma distribution of gaps; 1 is a Poisson process", _LOAD),
    Flag(("--max-concurrency",), "int", None, "requests open at once", _LOAD),
    Flag(("--seed",), "int", 0, "of the words, lengths and gaps", _LOAD),
    Flag(("--goodput",), "append", None, "ttft:MS tpot:MS e2el:MS, which a good request stays within", _REPORT),
    Flag(("--percentiles", "--metric-percentiles"), "str", "50,90,95,99", "of each latency, with commas", _REPORT),
    Flag(("--json",), "str", None, "write the summary and every request's times to this file", _REPORT),
    Flag(("--plot",), "str", None, "write a PNG of throughput and latencies (matplotlib: the extra bench)", _REPORT),
)
_USAGE = """\
usage: ts bench serve [--base-url URL] [flags]

random    prompts of random words
sharegpt  the first question of conversations: a JSON list of {conversations: [{from, value}]} or {messages: [...]}
agent     sessions of growing turns behind a shared system prompt
trace     requests at the times, of the lengths and with the shared prefixes of a trace of Mooncake's format

Prompts are made of words, about a token each; the report tells the tokens that the server counted.
"""
_AT_LEAST = {"num_prompts": 1, "input_len": 1, "output_len": 1, "num_turns": 1, "system_len": 0, "max_concurrency": 1}
_ABOVE_ZERO = ("timeout", "trace_speed", "request_rate", "burstiness")
_GOALS = ("ttft", "tpot", "e2el")


def main(argv: Sequence[str]) -> int:
    """Exit status: 1 when the server or a request failed. Raises FlagError for a wrong command line or file."""
    if {"--help", "-h"} & set(argv):
        print(_USAGE + help_text(FLAGS))
        return 0
    flags = make_flags(argv)
    if flags["plot"] and not can_plot():
        raise FlagError("--plot", "matplotlib is not installed: pip install 'tokenspeed[bench]'")
    sessions = make_sessions(flags)
    with contextlib.ExitStack() as files:
        out = files.enter_context(_opened("--json", flags["json"])) if flags["json"] else None
        if flags["plot"]:
            files.enter_context(_opened("--plot", flags["plot"]))
        outcomes: list[Outcome] = []
        interrupted = False
        try:
            model = asyncio.run(_run(flags, sessions, outcomes))
        except ServerError as error:
            print(f"ts bench serve: error: {error}", file=sys.stderr)
            return error.status
        except KeyboardInterrupt:
            if not outcomes:
                raise
            model, interrupted = flags["model"] or "", True
        summary = {"model": model, **summarize(outcomes, flags["percentiles"], flags["goodput"])}
        if out is not None:
            json.dump({**summary, "requests": [_row(outcome) for outcome in outcomes]}, out)
    print(table(summary, flags["percentiles"]))
    if flags["plot"]:
        plot(outcomes, summary, flags["plot"])
    if interrupted:
        print(f"ts bench serve: interrupted after {len(outcomes)} of {flags['num_prompts']} requests", file=sys.stderr)
        return INTERRUPTED
    return 1 if summary["failed"] else 0


def make_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The values by destination, percentiles and goodput read. Raises FlagError."""
    parsed = parse_flags(_repeated("--goodput", argv), FLAGS)
    if parsed.rest:
        raise FlagError(parsed.rest[0], "no such flag of ts bench serve")
    if "model" in parsed.given and parsed.given["model"] == "MODEL":
        raise FlagError("--model", f"{parsed.values['model']!r} stands alone")
    flags = parsed.values
    for name, value in _AT_LEAST.items():
        if flags[name] is not None and flags[name] < value:
            raise FlagError(_spelled(name), f"must be at least {value}, got {flags[name]}")
    for name in _ABOVE_ZERO:
        if not flags[name] > 0 or (name != "request_rate" and math.isinf(flags[name])):
            raise FlagError(_spelled(name), f"must be a number above 0, got {flags[name]}")
    if not 0 <= flags["range_ratio"] < 1:
        raise FlagError("--range-ratio", f"must be at least 0 and below 1, got {flags['range_ratio']}")
    if not flags["base_url"].startswith(("http://", "https://")):
        raise FlagError("--base-url", f"{flags['base_url']} is not an http address")
    _check_workload(flags, parsed.given)
    flags["extra_body"] = json_object(flags, "extra_body")
    flags["percentiles"] = _percentiles(flags["percentiles"])
    flags["goodput"] = dict(_goal(text) for text in flags["goodput"] or ())
    return flags


def _check_workload(flags: dict[str, Any], given: dict[str, str]) -> None:
    """A flag that its workload would not look at is refused."""
    reads = {
        "data": ("sharegpt", "trace"),
        "input_len": ("random", "agent"),
        "range_ratio": ("random", "agent"),
        "output_len": ("random", "agent", "sharegpt"),
        "num_turns": ("agent",),
        "system_len": ("agent",),
        "trace_speed": ("trace",),
        "request_rate": ("random", "agent", "sharegpt"),
        "burstiness": ("random", "agent", "sharegpt"),
    }
    for name, workloads in reads.items():
        if name in given and flags["workload"] not in workloads:
            raise FlagError(given[name], f"is for --workload {', '.join(workloads)}, not {flags['workload']}")
    if flags["workload"] in reads["data"] and flags["data"] is None:
        raise FlagError("--data", f"is needed for --workload {flags['workload']}")


def make_sessions(flags: dict[str, Any]) -> list[Session]:
    """Raises FlagError for a file that is wrong."""
    count, seed = flags["num_prompts"], flags["seed"]
    lengths = Lengths(flags["input_len"], flags["output_len"] or 128, flags["range_ratio"])
    if flags["workload"] == "random":
        return bench_workloads.random_sessions(count, lengths, seed)
    if flags["workload"] == "agent":
        return bench_workloads.agent_sessions(count, flags["num_turns"], flags["system_len"], lengths, seed)
    if flags["workload"] == "sharegpt":
        return bench_workloads.shared_conversations(flags["data"], count, flags["output_len"], seed)
    return bench_workloads.trace_sessions(flags["data"], count, flags["trace_speed"])


async def _run(flags: dict[str, Any], sessions: Sequence[Session], outcomes: list[Outcome]) -> str:
    """The model's name. outcomes: takes one a request, in the order of the sessions once all have ended, and as they
    end until then."""
    progress = Progress(flags["num_prompts"], sys.stderr, "answered")
    starts_s = bench_workloads.starts(sessions, flags["request_rate"], flags["burstiness"], flags["seed"])
    async with Client(flags["base_url"], flags["api_key"], 1, flags["timeout"]) as client:
        await client.choose_model(flags["model"])
        fields = {**({"ignore_eos": True} if flags["ignore_eos"] else {}), **flags["extra_body"]}
        send = Sender(client, flags["api"], fields, time.perf_counter)

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            progress.count({"correct": not outcome.error})

        try:
            outcomes[:] = await run_sessions(sessions, starts_s, send, flags["max_concurrency"], done)
        finally:
            progress.close()
    return client.model


def _row(outcome: Outcome) -> dict[str, Any]:
    """One request of --json, times in seconds."""
    return {
        "begin": outcome.begin_s,
        "token_times": outcome.token_times,
        "input_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "error": outcome.error or None,
    }


def _repeated(flag: str, argv: Sequence[str]) -> list[str]:
    """`--x a b` as `--x a --x b`."""
    words: list[str] = []
    for place, word in enumerate(argv):
        follows = len(words) >= 2 and words[-2] == flag and place >= 2
        words += [flag, word] if follows and not word.startswith("--") else [word]
    return words


def _percentiles(text: str) -> list[float]:
    try:
        percents = [float(word) for word in text.split(",")]
    except ValueError:
        percents = [-1.0]
    if not all(0 <= percent <= 100 for percent in percents):
        raise FlagError("--percentiles", f"{text!r} is not a list of numbers from 0 to 100")
    return percents


def _goal(text: str) -> tuple[str, float]:
    name, _, number = text.partition(":")
    try:
        goal_ms = float(number)
    except ValueError:
        goal_ms = math.nan
    if name not in _GOALS or not goal_ms > 0:
        raise FlagError("--goodput", f"{text!r} is not one of {', '.join(_GOALS)} with :MILLISECONDS")
    return name, goal_ms


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _opened(flag: str, path: str) -> Any:
    """Opened before anything is asked, so that a long run is not lost to a missing folder."""
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise FlagError(flag, f"{path}: {error.strerror}") from None
