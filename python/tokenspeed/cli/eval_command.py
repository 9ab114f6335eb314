# SPDX-License-Identifier: MIT
"""`ts eval`: score a model on a task file, through a running server or one that is started for it.

Checks every flag and every line of the file first, then asks with `--concurrency` requests open, scores each answer as
it comes, and prints one summary line. A request that failed is reported and never counted as a wrong answer; the exit
status is then 1. Runs on the main thread with an event loop; the server is `eval_server`'s matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from tokenspeed.cli import eval_tasks
from tokenspeed.cli.eval_code import PASSED, CodeLimits, run_program
from tokenspeed.cli.eval_server import Client, ServerError, own_server
from tokenspeed.cli.eval_tasks import Item
from tokenspeed.config.flags import Flag, FlagError, parse_flags
from tokenspeed.config.flags_help import help_text

_RUN, _TASK, _CODE = "server", "task", "humaneval's programs"
FLAGS = (
    Flag(("--model",), "str", None, "what `ts serve` loads; with --base-url the name in requests", _RUN),
    Flag(("--base-url",), "str", None, "a running server; without it one is started and ended", _RUN),
    Flag(("--api-key",), "str", None, "sent to --base-url as a bearer token", _RUN),
    Flag(("--startup-timeout",), "float", 600.0, "seconds until the own server must be ready", _RUN),
    Flag(("--task",), "str", None, "what the file holds and how it is scored", _TASK, choices=eval_tasks.TASKS),
    Flag(("--data",), "str", None, "the task file, one JSON object a line", _TASK),
    Flag(("--num-shots",), "int", 0, "items from the file's begin shown as examples, and not scored", _TASK),
    Flag(("--limit",), "int", None, "score so many items at most", _TASK),
    Flag(("--api",), "str", "completions", "which endpoint is asked", _TASK, choices=("completions", "chat")),
    Flag(("--concurrency",), "int", 8, "requests open at once", _TASK),
    Flag(("--temperature",), "float", 0.0, "of generated answers", _TASK),
    Flag(("--max-tokens",), "int", 512, "of a generated answer", _TASK),
    Flag(("--timeout",), "float", 600.0, "seconds for one request", _TASK),
    Flag(("--json",), "switch", False, "print the summary as JSON", _TASK),
    Flag(("--out",), "str", None, "write one JSON object an item to this file", _TASK),
    Flag(("--allow-code-execution",), "switch", False, "run what the model wrote; no security boundary", _CODE),
    Flag(("--code-timeout",), "float", 10.0, "seconds for one program", _CODE),
    Flag(("--code-memory-mb",), "int", 1024, "MiB of address space for one program", _CODE),
)
_USAGE = """\
usage: ts eval [MODEL] --task TASK --data FILE [flags] [-- flags of ts serve]

gsm8k      {question, answer}                    the last number of the answer, or the one after ####, is compared
humaneval  {task_id, prompt, test, entry_point}  pass@1: completed functions run against their tests
choice     {question, choices, answer}           the likeliest choice by the sum of its tokens' logprobs

humaneval runs code that a model wrote on this machine, as you. Limits on time and memory and refused sockets keep
accidents small; they are not a security boundary, so use a container or a machine that you can lose.
"""


@dataclass(frozen=True)
class Plan:
    """A checked command line. `shots` are shown, `items` scored."""

    flags: dict[str, Any]
    serve_words: list[str]
    shots: list[Item]
    items: list[Item]


def main(argv: Sequence[str]) -> int:
    """Exit status: 1 when the server or a request failed. Raises FlagError for a wrong command line or file."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    if {"--help", "-h"} & set(words[:cut]):
        print(_USAGE + help_text(FLAGS))
        return 0
    plan = make_plan(words[:cut], words[cut + 1 :])
    try:
        with _opened(plan.flags["out"]) as out, _server(plan) as url:
            summary = asyncio.run(_evaluate(plan, url, out))
    except ServerError as error:
        print(f"ts eval: error: {error}", file=sys.stderr)
        return error.status
    print(json.dumps(summary) if plan.flags["json"] else summary_line(summary))
    return 1 if summary["failed"] else 0


def make_plan(words: Sequence[str], serve_words: Sequence[str]) -> Plan:
    """Everything that can be wrong before a server is asked is found here. Raises FlagError."""
    parsed = parse_flags(words, FLAGS)
    if parsed.rest:
        raise FlagError(parsed.rest[0], "no such flag of ts eval (flags of ts serve go behind --)")
    flags = parsed.values
    _check_flags(flags, serve_words)
    items = eval_tasks.read_items(flags["task"], flags["data"])
    shots, scored = eval_tasks.split_shots(flags["task"], items, flags["num_shots"])
    return Plan(flags, list(serve_words), shots, scored[: flags["limit"]])


def _check_flags(flags: dict[str, Any], serve_words: Sequence[str]) -> None:
    for name in ("task", "data"):
        if flags[name] is None:
            raise FlagError(f"--{name}", "is needed")
    least = {"limit": 1, "concurrency": 1, "max_tokens": 1, "code_memory_mb": 64, "temperature": 0}
    for name, value in least.items():
        if flags[name] is not None and not flags[name] >= value:
            raise FlagError("--" + name.replace("_", "-"), f"must be at least {value}, got {flags[name]}")
    for name in ("startup_timeout", "timeout", "code_timeout"):
        if not 0 < flags[name] < 1e9:
            raise FlagError("--" + name.replace("_", "-"), f"{flags[name]} is not a number of seconds")
    url = flags["base_url"]
    if url is not None and not url.startswith(("http://", "https://")):
        raise FlagError("--base-url", f"{url} is not an http address")
    if url is not None and serve_words:
        raise FlagError(serve_words[0], "flags of ts serve are of no use with --base-url")
    if url is None and flags["api_key"] is not None:
        raise FlagError("--api-key", "is for --base-url; the own server asks for none")
    if flags["task"] == "choice" and flags["api"] == "chat":
        raise FlagError("--api", "choice needs logprobs of a prompt, which completions alone give")
    if flags["task"] == "humaneval" and not flags["allow_code_execution"]:
        raise FlagError(
            "--allow-code-execution",
            "humaneval runs code that the model wrote on this machine, with limits that are no security boundary; "
            "give this flag if you want that",
        )


def _server(plan: Plan) -> contextlib.AbstractContextManager[str]:
    if plan.flags["base_url"] is not None:
        return contextlib.nullcontext(plan.flags["base_url"])
    return own_server(plan.flags["model"], plan.serve_words, plan.flags["startup_timeout"])


def _opened(path: str | None) -> contextlib.AbstractContextManager[IO[str] | None]:
    """Opened before anything is asked, so that an hour of answers is not lost to a missing folder."""
    if path is None:
        return contextlib.nullcontext()
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise FlagError("--out", f"{path}: {error.strerror}") from None


async def _evaluate(plan: Plan, url: str, out: IO[str] | None) -> dict[str, Any]:
    flags = plan.flags
    progress = Progress(len(plan.items), sys.stderr, "right")
    async with Client(url, flags["api_key"], flags["concurrency"], flags["timeout"]) as client:
        await client.choose_model(flags["model"] if flags["base_url"] else None)
        # One program a running request at most; requests wait for their slots in the client.
        slots = asyncio.Semaphore(flags["concurrency"])

        async def scored(item: Item) -> dict[str, Any]:
            async with slots:
                result = await _result(plan, client, item)
            progress.count(result)
            return result

        results = await asyncio.gather(*(scored(item) for item in plan.items))
    progress.close()
    if out is not None:
        out.writelines(json.dumps(result, ensure_ascii=False) + "\n" for result in results)
    return summarize(flags["task"], client.model, results)


async def _result(plan: Plan, client: Client, item: Item) -> dict[str, Any]:
    """One line of --out: `name` and either `correct` with what it was decided by, or `error`."""
    try:
        return {"name": item.name, **await _scored(plan, client, item)}
    except ServerError as error:
        return {"name": item.name, "error": str(error)}


async def _scored(plan: Plan, client: Client, item: Item) -> dict[str, Any]:
    flags = plan.flags
    if flags["task"] == "choice":
        return await _choice(plan, client, item)
    text = await _generated(plan, client, item)
    if flags["task"] == "gsm8k":
        number = eval_tasks.final_number(text.partition("\nQuestion:")[0])
        correct = eval_tasks.number_is_right(item, text)
        return {"correct": correct, "extracted": None if number is None else str(number), "text": text}
    limits = CodeLimits(flags["code_timeout"], flags["code_memory_mb"] << 20)
    outcome = await run_program(eval_tasks.program(item, text, flags["api"] == "chat"), limits)
    return {"correct": outcome == PASSED, "outcome": outcome, "text": text}


async def _generated(plan: Plan, client: Client, item: Item) -> str:
    flags, task = plan.flags, plan.flags["task"]
    body = {"temperature": flags["temperature"], "max_tokens": flags["max_tokens"]}
    try:
        if flags["api"] == "chat":
            content = eval_tasks.chat_prompt(task, plan.shots, item)
            body["messages"] = [{"role": "user", "content": content}]
            answer = await client.post("/v1/chat/completions", body)
            return answer["choices"][0]["message"]["content"] or ""
        plain = item.fields["prompt"] if task == "humaneval" else eval_tasks.question_prompt(task, plan.shots, item)
        # OpenAI takes four stops at most; the rest are cut here.
        stops = eval_tasks.STOPS[task]
        answer = await client.post("/v1/completions", {**body, "prompt": plain, "stop": list(stops[:4])})
        return eval_tasks.cut_at(answer["choices"][0]["text"], stops)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ServerError(f"the answer has no text: {error!r}") from None


async def _choice(plan: Plan, client: Client, item: Item) -> dict[str, Any]:
    context = eval_tasks.question_prompt("choice", plan.shots, item)
    scores: list[float] = []
    for choice in item.fields["choices"]:
        body = {"prompt": f"{context} {choice}", "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        try:
            scores.append(eval_tasks.continuation_logprob(await client.post("/v1/completions", body), context))
        except ValueError as error:
            raise ServerError(str(error)) from None
    chosen = eval_tasks.best_choice(scores)
    return {"correct": chosen == item.fields["answer"], "chosen": chosen, "logprobs": scores}


def summarize(task: str, model: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy over the items that were answered; null when none was. `first_error`: null when none failed."""
    right = [result["correct"] for result in results if "error" not in result]
    errors = [f"{result['name']}: {result['error']}" for result in results if "error" in result]
    share, stderr = eval_tasks.accuracy(right) if right else (None, None)
    return {
        "task": task,
        "model": model,
        "accuracy": share,
        "stderr": stderr,
        "correct": sum(right),
        "scored": len(right),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
    }


def summary_line(summary: dict[str, Any]) -> str:
    """`gsm8k: accuracy 0.500 ± 0.289 (2 of 4), model m`, and what failed."""
    share, stderr = summary["accuracy"], summary["stderr"]
    known = "none answered" if share is None else f"{share:.3f}" + ("" if stderr is None else f" ± {stderr:.3f}")
    line = (
        f"{summary['task']}: accuracy {known} ({summary['correct']} of {summary['scored']}), model {summary['model']}"
    )
    failed = summary["failed"]
    return f"{line}; {failed} failed, the first: {summary['first_error']}" if failed else line


class Progress:
    """A bar on a terminal; nothing elsewhere."""

    _WIDTH = 30

    def __init__(self, total: int, stream: IO[str], said: str) -> None:
        self._total, self._stream, self._live, self._said = total, stream, stream.isatty(), said
        self.done = self._right = 0

    def count(self, result: dict[str, Any]) -> None:
        self.done += 1
        self._right += bool(result.get("correct"))
        if self._live:
            bar = "#" * (self._WIDTH * self.done // self._total)
            self._stream.write(f"\r[{bar:<{self._WIDTH}}] {self.done}/{self._total}, {self._right} {self._said}")
            self._stream.flush()

    def close(self) -> None:
        if self._live:
            self._stream.write("\n")
