# SPDX-License-Identifier: MIT
"""What `ts bench serve` asks: sessions of turns, made of words or read from a file, and when each begins.

Pure: the same arguments and seed give the same sessions. Prompts are made of common English words, about a token each
in most vocabularies; how many tokens they were is what the server says. Raises FlagError for a file that is wrong.
"""

from __future__ import annotations

import itertools
import json
import lzma
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.config.flags import FlagError

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work night point home water room mother area money story
fact month lot right study book eye job word business side kind head house service friend father power hour game
"""
_WORDS = _TEXT.split()
_TRACE_BLOCK = 512
"""Tokens that one hash of a Mooncake trace stands for."""
_TOKENS_PER_WORD = 1.3
_HUMAN, _REPLY = ("human", "user"), ("gpt", "assistant", "chatgpt", "model")


@dataclass(frozen=True)
class Turn:
    """What the user says, and how many tokens the answer may have."""

    content: str
    max_tokens: int


@dataclass(frozen=True)
class Session:
    """Turns in order; each is asked with everything before it. at_s: when the first is due, None for the rate's."""

    system: str
    turns: tuple[Turn, ...]
    at_s: float | None


@dataclass(frozen=True)
class Lengths:
    """Words of a prompt and tokens of an answer, each drawn from [1 - spread, 1 + spread] times the mean."""

    num_input: int
    num_output: int
    spread: float

    def draw(self, rng: random.Random) -> tuple[int, int]:
        low, high = 1 - self.spread, 1 + self.spread
        return (
            max(1, round(self.num_input * rng.uniform(low, high))),
            max(1, round(self.num_output * rng.uniform(low, high))),
        )


def random_sessions(count: int, lengths: Lengths, seed: int) -> list[Session]:
    """`count` prompts that share nothing."""
    rng = random.Random(seed)
    return [Session("", (_turn(rng, lengths),), None) for _ in range(count)]


def agent_sessions(count: int, num_turns: int, num_system: int, lengths: Lengths, seed: int) -> list[Session]:
    """`count` turns in sessions of `num_turns`, which share a system prompt of `num_system` words."""
    rng = random.Random(seed)
    system = _words(rng, num_system)
    sizes = [min(num_turns, count - begun) for begun in range(0, count, num_turns)]
    return [Session(system, tuple(_turn(rng, lengths) for _ in range(size)), None) for size in sizes]


def shared_conversations(path: str, count: int, num_output: int | None, seed: int) -> list[Session]:
    """The first question of `count` conversations, drawn without repeats; the answer's length is that of the file's
    answer unless `num_output` says another."""
    listed = _json(path)
    if not isinstance(listed, list):
        raise FlagError("--data", f"{path}: not a JSON list of conversations")
    pairs = [pair for pair in (_first_pair(entry) for entry in listed) if pair is not None]
    if len(pairs) < count:
        raise FlagError("--num-prompts", f"{path} has {len(pairs)} conversations with a question and an answer")
    chosen = random.Random(seed).sample(pairs, count)
    return [
        Session("", (Turn(question, num_output or math.ceil(len(answer.split()) * _TOKENS_PER_WORD)),), None)
        for question, answer in chosen
    ]


def trace_sessions(path: str, count: int, speed: float) -> list[Session]:
    """The first `count` requests of a trace of Mooncake's format (plain or .xz), `speed` times as fast."""
    sessions: list[Session] = []
    for number, line in enumerate(_lines(path), 1):
        if len(sessions) == count:
            break
        if line.strip():
            sessions.append(_traced(line, f"{path}:{number}", speed))
    if len(sessions) < count:
        raise FlagError("--num-prompts", f"{path} has {len(sessions)} requests")
    return sessions


def starts(sessions: Sequence[Session], rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the run's begin to each session's: its own time, or gaps drawn from a gamma distribution of mean
    1 / rate and shape `burstiness` (1: a Poisson process; less: bursts)."""
    rng = random.Random(seed)
    gaps = [0.0 if math.isinf(rate) else rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in sessions[1:]]
    drawn = itertools.accumulate([0.0, *gaps])
    return [at_s if session.at_s is None else session.at_s for session, at_s in zip(sessions, drawn, strict=False)]


def _turn(rng: random.Random, lengths: Lengths) -> Turn:
    num_input, num_output = lengths.draw(rng)
    return Turn(_words(rng, num_input), num_output)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def _traced(line: str, where: str, speed: float) -> Session:
    try:
        row = json.loads(line)
        at_ms, num_input, num_output = (row[name] for name in ("timestamp", "input_length", "output_length"))
        blocks = [int(block) for block in row["hash_ids"]]
        ok = at_ms >= 0 and num_input >= 1 and num_output >= 1 and len(blocks) * _TRACE_BLOCK >= num_input
    except (ValueError, KeyError, TypeError) as error:
        raise FlagError("--data", f"{where}: {error!r}") from None
    if not ok:
        raise FlagError("--data", f"{where}: the lengths or hash_ids do not fit each other")
    # Equal hashes give equal words, so prefixes are shared as they were.
    words = [word for block in blocks for word in random.Random(block).choices(_WORDS, k=_TRACE_BLOCK)]
    return Session("", (Turn(" ".join(words[:num_input]), num_output),), at_ms / 1000 / speed)


def _first_pair(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations", entry.get("messages")) if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    said = [(turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))) for turn in turns]
    for (speaker, question), (answerer, answer) in itertools.pairwise(said):
        whole = isinstance(question, str) and isinstance(answer, str) and question.strip() and answer.strip()
        if speaker in _HUMAN and answerer in _REPLY and whole:
            return question, answer
    return None


def _json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FlagError("--data", f"{path}: {error}") from None


def _lines(path: str) -> list[str]:
    try:
        raw = Path(path).read_bytes()
        return (lzma.decompress(raw) if path.endswith(".xz") else raw).decode().splitlines()
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise FlagError("--data", f"{path}: {error}") from None
