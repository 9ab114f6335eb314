# SPDX-License-Identifier: MIT
"""The engine's flags: what a flag is, and how command lines and keyword arguments become values.

Every flag of the table is either honoured or refused with a reason; there is no third kind. `parse_flags` and
`values_from_kwargs` are pure: they return plain values for `config.resolve` and raise `FlagError`, which the commands
turn into one line on stderr and exit status 2. The table itself is in `flags_honoured` and `flags_refused`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["str", "int", "float", "switch", "off", "bool", "append", "ints"]
"""switch: sets true. off: sets its destination false. bool: says either. All three also as --no-x, --x=true and
--x=false. append: repeatable. ints: one or more."""

_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class FlagError(ValueError):
    """A flag that is unknown, refused or has a bad value; the text names it and says why."""

    def __init__(self, flag: str, message: str) -> None:
        super().__init__(f"{flag}: {message}")
        self.flag = flag


@dataclass(frozen=True)
class Flag:
    """One row of the table. `names[0]` is the name that documentation uses."""

    names: tuple[str, ...]
    kind: Kind
    default: Any
    help: str
    group: str
    choices: tuple[Any, ...] = ()
    accepts: tuple[Any, ...] = ()
    """Of a refused flag: the values that ask for nothing beyond what happens anyway."""
    refusal: str = ""
    """Why the flag is refused; empty when it is honoured."""
    target: str = ""
    """The destination when it is not the name with underscores."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def dest(self) -> str:
        """The key of its value, and the keyword of `Engine(...)`."""
        return self.target or self.name.lstrip("-").replace("-", "_").replace(".", "_")

    @property
    def status(self) -> str:
        """`honoured`, or `refused: <reason>`; for the generated documentation."""
        return f"refused: {self.refusal}" if self.refusal else "honoured"

    @property
    def takes_value(self) -> bool:
        return self.kind not in ("switch", "off", "bool")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All names that a command line may use."""
        return self.names if self.takes_value else self.names + tuple("--no-" + name[2:] for name in self.names)


@dataclass(frozen=True)
class ParsedFlags:
    """`values`: by destination, every flag of the table, defaults filled in. `given`: destination to the spelling
    that the user wrote. `rest`: flags that are not in the table, with what followed them, in order."""

    values: dict[str, Any]
    given: dict[str, str]
    rest: list[str] = field(default_factory=list)


def parse_flags(argv: Sequence[str], table: Sequence[Flag]) -> ParsedFlags:
    """Parse `argv` (without the command). A lone word before any unknown flag is the model.

    Raises FlagError for a refused flag, a bad or missing value. Unknown flags are left in `rest` for the caller.
    """
    index = _by_name(table)
    values, rest = defaults(table), list[str]()
    given: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, inline = word.partition("=")
        if not word.startswith("--"):
            _take_model(word, values, given)
            continue
        flag = index.get(name)
        if flag is None:
            rest.append(word)
            while words and not words[0].startswith("--"):
                rest.append(words.pop(0))
            continue
        raw = [inline] if equals else _operands(flag, words)
        _store(flag, name, _value(flag, name, raw, _implied(flag, name), bool(equals)), values, given)
    return ParsedFlags(values, given, rest)


def take_flag(flag: Flag, name: str, words: list[str], values: dict[str, Any], given: dict[str, str]) -> None:
    """Store what a command line says of one flag. name: as it was written. words: its operands. Raises FlagError."""
    _store(flag, name, _value(flag, name, words, _implied(flag, name), inline=False), values, given)


def values_from_kwargs(kwargs: Mapping[str, Any], table: Sequence[Flag]) -> ParsedFlags:
    """The same for `Engine(max_model_len=...)`: keywords are flag names with underscores."""
    by_dest: dict[str, Flag] = {}
    for flag in table:
        if flag.kind != "off" or flag.dest not in by_dest:
            by_dest[flag.dest] = flag
        by_dest.update({name.lstrip("-").replace("-", "_").replace(".", "_"): flag for name in flag.names})
    values: dict[str, Any] = defaults(table)
    given: dict[str, str] = {}
    for keyword, value in kwargs.items():
        if keyword not in by_dest:
            raise FlagError(keyword, "no such option")
        flag = by_dest[keyword]
        if value is None:
            continue
        _store(flag, keyword, _checked(flag, keyword, value), values, given)
    return ParsedFlags(values, given)


def defaults(table: Iterable[Flag]) -> dict[str, Any]:
    """Every destination of the table with its default value."""
    values: dict[str, Any] = {}
    for flag in table:
        if flag.kind == "off":
            values.setdefault(flag.dest, True)
        else:
            values[flag.dest] = flag.default
    return values


def json_object(values: Mapping[str, Any], dest: str) -> dict[str, Any]:
    """The object that a flag's text holds; empty when it was not given. Raises FlagError."""
    text, name = values[dest], "--" + dest.replace("_", "-")
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise FlagError(name, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FlagError(name, "must be a JSON object")
    return value


def _by_name(table: Iterable[Flag]) -> dict[str, Flag]:
    return {name: flag for flag in table for name in flag.spellings}


def _implied(flag: Flag, name: str) -> bool:
    """What the bare spelling of a flag without a value says."""
    return (name not in flag.names) == (flag.kind == "off")


def _take_model(word: str, values: dict[str, Any], given: dict[str, str]) -> None:
    _refuse_second_model(word, values, given)
    values["model"] = word
    given["model"] = "MODEL"


def _refuse_second_model(word: str, values: dict[str, Any], given: dict[str, str]) -> None:
    if "model" in given:
        raise FlagError("MODEL", f"given twice: {values['model']!r} and {word!r}")


def _operands(flag: Flag, words: list[str]) -> list[str]:
    """Remove the flag's operands from the front of `words`."""
    limit = {"ints": len(words)}.get(flag.kind, 1 if flag.takes_value else 0)
    taken: list[str] = []
    while words and len(taken) < limit and not words[0].startswith("--"):
        taken.append(words.pop(0))
    return taken


def _value(flag: Flag, name: str, raw: list[str], implied: bool, inline: bool) -> Any:
    if not flag.takes_value:
        if not inline:
            return implied
        if raw[0].lower() not in _TRUTHS:
            raise FlagError(name, f"{raw[0]!r} is neither true nor false")
        return implied == _TRUTHS[raw[0].lower()]
    if not raw:
        raise FlagError(name, f"needs a value ({flag.kind})")
    try:
        if flag.kind == "ints":
            return _checked(flag, name, tuple(int(word) for word in raw))
        convert = {"int": int, "float": float}.get(flag.kind, str)
        return _checked(flag, name, convert(raw[0]))
    except FlagError:
        raise
    except ValueError:
        raise FlagError(
            name, f"{raw[0]!r} is not {'an integer' if flag.kind in ('int', 'ints') else 'a number'}"
        ) from None


def _checked(flag: Flag, name: str, value: Any) -> Any:
    """`value` if it has the flag's type and is one of its choices."""
    expected: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "append": (str, list, tuple),
        "int": (int,),
        "float": (int, float),
        "ints": (list, tuple),
    }
    types = expected.get(flag.kind, (bool,))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise FlagError(name, f"{value!r} is not of type {flag.kind if flag.takes_value else 'bool'}")
    if flag.choices and value not in flag.choices:
        raise FlagError(name, f"{value!r} is not one of {', '.join(map(str, flag.choices))}")
    return value


def _store(flag: Flag, name: str, value: Any, values: dict[str, Any], given: dict[str, str]) -> None:
    if flag.refusal and value not in flag.accepts:
        raise FlagError(name, f"refused: {flag.refusal}")
    if flag.dest == "model":
        _refuse_second_model(value, values, given)
    if flag.kind == "append":
        before = tuple(values[flag.dest] or ()) if flag.dest in given else ()
        value = before + ((value,) if isinstance(value, str) else tuple(value))
    values[flag.dest] = value
    given[flag.dest] = name
