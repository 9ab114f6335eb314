# SPDX-License-Identifier: MIT
"""What `ts eval` asks and how an answer is scored: task files, prompts, and the last number of a text.

Pure: files are read and checked whole before a server is asked, and scoring looks at text and numbers alone. Programs
of the humaneval task are put together here and run by `eval_code`. `eval_command` calls all of it, on one thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tokenspeed.config.flags import FlagError

TASKS = ("gsm8k", "humaneval", "choice")
STOPS: dict[str, tuple[str, ...]] = {
    "gsm8k": ("\nQuestion:",),
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert "),
}
"""Where a completion ends by itself. In a chat the model ends its answer."""
_FIELDS: dict[str, tuple[str, ...]] = {
    "gsm8k": ("question", "answer"),
    "humaneval": ("task_id", "prompt", "test", "entry_point"),
    "choice": ("question",),
}
# Thousands in groups of three, or plain digits; a sign counts when no digit or letter stands before it.
_NUMBER = re.compile(r"(?:(?<![\w.])-)?\$?-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_FENCE = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Item:
    """One line of a task file. `fields`: as checked by `read_items`; `name`: how results call it."""

    name: str
    fields: Mapping[str, Any]


def read_items(task: str, path: str) -> list[Item]:
    """All items of a JSONL file, empty lines left out. Raises FlagError with file, line and field."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise FlagError("--data", f"{path}: {error.strerror}") from None
    items = [_item(task, f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise FlagError("--data", f"{path}: no items")
    return items


def _item(task: str, place: str, line: bytes) -> Item:
    try:
        fields = json.loads(line)
    except ValueError as error:  # bytes that are no UTF-8 too
        raise FlagError("--data", f"{place}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise FlagError("--data", f"{place}: not a JSON object")
    for name in _FIELDS[task]:
        if not isinstance(fields.get(name), str) or not fields[name].strip():
            raise FlagError("--data", f"{place}: {name}: a text is needed")
    if task == "gsm8k" and final_number(fields["answer"]) is None:
        raise FlagError("--data", f"{place}: answer: no number in it")
    if task == "humaneval" and not fields["entry_point"].isidentifier():
        raise FlagError("--data", f"{place}: entry_point: not the name of a function")
    if task == "choice":
        fields = {**fields, "answer": _checked_choice(place, fields)}
    return Item(fields.get("task_id") or f"line {place.rpartition(':')[2]}", fields)


def _checked_choice(place: str, fields: Mapping[str, Any]) -> int:
    """The right choice's index; a file may give the index or a letter from A on."""
    choices, answer = fields.get("choices"), fields.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        raise FlagError("--data", f"{place}: choices: a list of at least two texts is needed")
    if isinstance(answer, str) and len(answer) == 1:
        answer = ord(answer) - ord("A")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise FlagError("--data", f"{place}: answer: the index of a choice from 0 on, or its letter, is needed")
    return answer


def split_shots(task: str, items: Sequence[Item], num_shots: int) -> tuple[list[Item], list[Item]]:
    """(examples, items to be scored): the first `num_shots` items are shown with their answers and never scored."""
    if num_shots < 0 or (num_shots and task == "humaneval"):
        raise FlagError("--num-shots", "a count of examples; humaneval has none")
    if num_shots >= len(items):
        raise FlagError("--num-shots", f"{num_shots} examples leave nothing of {len(items)} items to score")
    return list(items[:num_shots]), list(items[num_shots:])


def question_prompt(task: str, shots: Sequence[Item], item: Item) -> str:
    """The examples with their answers, then the question with its answer left open."""
    blocks = [f"Question: {shot.fields['question']}\nAnswer: {_solution(task, shot)}\n\n" for shot in shots]
    return "".join(blocks) + f"Question: {item.fields['question']}\nAnswer:"


def _solution(task: str, shot: Item) -> str:
    answer = shot.fields["answer"]
    return str(shot.fields["choices"][answer] if task == "choice" else answer)


def chat_prompt(task: str, shots: Sequence[Item], item: Item) -> str:
    """The user's message: the same prompt, and what form the answer should have."""
    if task == "gsm8k":
        hint = 'Solve the last question step by step. End with a line "#### N", N being the number alone.'
        return f"{hint}\n\n{question_prompt(task, shots, item)}"
    code = item.fields["prompt"]
    return f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}\n```"


def final_number(text: str) -> Decimal | None:
    """The number after the last `####`; without one, the last number of the text. None if there is none."""
    _, marked, after = text.rpartition("####")
    if marked and (found := _NUMBER.search(after)):
        return _decimal(found.group())
    numbers = _NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))


def number_is_right(item: Item, text: str) -> bool:
    """Exact match of numbers, so that 18, 18.00 and $18 are the same; a next question that was made up is ignored."""
    return final_number(text.partition("\nQuestion:")[0]) == final_number(item.fields["answer"])


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stops."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def program(item: Item, text: str, chat: bool) -> str:
    """The function as completed, its test, and the call that runs the test."""
    prompt = item.fields["prompt"]
    if chat:
        block = _FENCE.search(text)
        # The prompt before it keeps imports and helpers that an answer takes for granted.
        written = f"{_preamble(prompt, item.fields['entry_point'])}\n{block.group(1) if block else text}"
    else:
        written = prompt + text
    return f"{written}\n\n{item.fields['test']}\n\ncheck({item.fields['entry_point']})\n"


def _preamble(prompt: str, entry_point: str) -> str:
    return prompt.partition(f"def {entry_point}(")[0]


def continuation_logprob(answer: Mapping[str, Any], context: str) -> float:
    """Sum of the log probabilities (nats) of the prompt's tokens that reach past `context`.

    answer: of `/v1/completions` with `echo` and `logprobs`; what was generated after the prompt is left out. A token
    that covers both the context's end and the choice's begin belongs to the choice. Raises ValueError for an answer
    without the prompt's logprobs.
    """
    try:
        columns = answer["choices"][0]["logprobs"]
        size = int(answer["usage"]["prompt_tokens"])
        logprobs, offsets = columns["token_logprobs"], columns["text_offset"]
        ends = [*offsets[1:size], len(context) + 1]
        if not 0 < size <= len(logprobs) or len(ends) != size:
            raise ValueError("as many logprobs as prompt tokens are needed")
        scored = [logprob for logprob, end in zip(logprobs[:size], ends) if end > len(context)]
        return float(sum(scored))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"the server gives no logprobs of an echoed prompt: {error!r}") from None


def best_choice(logprobs: Sequence[float]) -> int:
    """The index of the likeliest; the first of equals."""
    return max(range(len(logprobs)), key=lambda index: (logprobs[index], -index))


def accuracy(right: Sequence[bool]) -> tuple[float, float | None]:
    """(share of right ones, standard error of that share from the sample's variance; None for fewer than two)."""
    count = len(right)
    mean = sum(right) / count
    return mean, (mean * (1 - mean) / (count - 1)) ** 0.5 if count > 1 else None
