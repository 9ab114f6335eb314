# SPDX-License-Identifier: MIT
"""`--ext-yaml FILE`: flags out of a YAML mapping, as the words or the keywords that would say the same.

Keys are names of flags, with or without the dashes in front, with dashes or underscores inside. What is given beside
the file wins, flag by flag. A mapping or list under a flag that takes text becomes JSON. Reads the file, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tokenspeed.config.flags import Flag, FlagError, parse_flags, values_from_kwargs

NAME = "--ext-yaml"


def words_of_yaml(path: str, table: Sequence[Flag], given: Collection[str]) -> list[str]:
    """The words of a command line. given: destinations that the file does not decide any more. Raises FlagError."""
    index = {_key(name): flag for flag in reversed(table) for name in flag.spellings}
    words: list[str] = []
    seen: dict[str, str] = {}
    for key, value in _mapping(path).items():
        flag = index.get(_key(str(key)))
        if flag is None or flag.name == NAME:
            raise FlagError(NAME, f"{path}: {key}: {'no such flag' if flag is None else 'a file names no other one'}")
        if flag.dest in seen:
            raise FlagError(NAME, f"{path}: {key} and {seen[flag.dest]} are the same flag")
        seen[flag.dest] = str(key)
        if value is not None and flag.dest not in given:
            words += _words(_spelled(flag, str(key)), flag, value)
    return words


def without_yaml(argv: Sequence[str]) -> list[str]:
    """The words without the flag and its operand."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if not skip and word.partition("=")[0] != NAME:
            kept.append(word)
        skip = word == NAME
    return kept


def keywords_with_yaml(keywords: Mapping[str, Any], table: Sequence[Flag]) -> dict[str, Any]:
    """The keywords of `Engine`, those of the file behind them. Raises FlagError."""
    path = keywords.get("ext_yaml")
    others = {name: value for name, value in keywords.items() if name != "ext_yaml" and value is not None}
    if path is None:
        return others
    words = words_of_yaml(str(path), table, values_from_kwargs(others, table).given)
    parsed = parse_flags(words, table)
    return {**{dest: parsed.values[dest] for dest in parsed.given}, **others}


def _mapping(path: str) -> dict[Any, Any]:
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise FlagError(NAME, f"{path}: {why}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise FlagError(NAME, f"{path}: must hold a mapping from flags to values")
    return found


def _key(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _spelled(flag: Flag, key: str) -> str:
    return next(name for name in flag.spellings if _key(name) == _key(key))


def _words(name: str, flag: Flag, value: Any) -> list[str]:
    if flag.kind == "append":
        return [f"{name}={item}" for item in (value if isinstance(value, list) else [value])]
    if flag.kind == "ints" and isinstance(value, list):
        return [name, *map(str, value)]
    if isinstance(value, dict | list):
        value = json.dumps(value)
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
