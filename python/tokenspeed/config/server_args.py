# SPDX-License-Identifier: MIT
"""`ServerArgs`: the engine's flags as one dataclass, for programs that parse and start the engine themselves.

A field a flag, by the name of the keyword that `Engine` takes; properties for what such programs read under another
name. The table of flags is the only source: what it refuses, the parser refuses in its own words, with exit status 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

from tokenspeed.config.flags import Flag, FlagError, defaults, parse_flags, take_flag
from tokenspeed.config.flags_table import ENGINE_FLAGS, SERVER_FLAGS
from tokenspeed.config.flags_yaml import words_of_yaml

TABLE = SERVER_FLAGS + ENGINE_FLAGS
_ENGINE_NAMES = frozenset(flag.dest for flag in ENGINE_FLAGS)
_GIVEN = "_given"


@dataclass(frozen=True)
class AttentionMapping:
    """Replicas of the attention layers."""

    dp_size: int

    @property
    def has_dp(self) -> bool:
        return self.dp_size > 1


@dataclass(frozen=True)
class Mapping:
    """How many processes there are, and of what."""

    world_size: int
    attn: AttentionMapping


class _Access:
    """What is no field. Mixed into the dataclass below."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Every flag of the table, and the model as a lone word."""
        parser.add_argument("model_path", nargs="?", default=None, help="The model; the same as --model.")
        for flag in TABLE:
            _add(parser, flag)

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Any:
        """Raises FlagError for a model that is given twice, and for a bad file of flags."""
        values = dict(vars(namespace))
        given = values.pop(_GIVEN, {})
        word = values.pop("model_path", None)
        if word is not None:
            if values.get("model") is not None:
                raise FlagError("MODEL", f"given twice: {values['model']!r} and {word!r}")
            values["model"] = word
            given["model"] = "MODEL"
        path = values.pop("ext_yaml", None)
        if path is not None:
            parsed = parse_flags(words_of_yaml(path, TABLE, given), TABLE)
            values.update({dest: parsed.values[dest] for dest in parsed.given})
        known = defaults(TABLE)
        return cls(**{name: value for name, value in values.items() if name in known})

    def engine_options(self) -> dict[str, Any]:
        """Keywords of `Engine`: what differs from the defaults."""
        usual = defaults(ENGINE_FLAGS)
        return {name: getattr(self, name) for name in _ENGINE_NAMES if getattr(self, name) != usual[name]}

    @property
    def prefix_granularity(self) -> int:
        return int(self.block_size)

    @property
    def page_size(self) -> int:
        return int(self.block_size)

    @property
    def max_running_requests(self) -> int | None:
        return None if self.max_num_seqs is None else int(self.max_num_seqs)

    @property
    def attention_dp_size(self) -> int:
        return int(self.data_parallel_size or 1)

    @property
    def mapping(self) -> Mapping:
        size = int(self.tensor_parallel_size or 1) * self.attention_dp_size
        return Mapping(size, AttentionMapping(self.attention_dp_size))

    @property
    def constrained_decoding(self) -> str:
        return "" if self.grammar_backend == "none" else "requested"


ServerArgs: Any = make_dataclass(
    "ServerArgs",
    [(name, Any, field(default=value)) for name, value in defaults(TABLE).items()]
    + [("max_total_num_tokens", int, field(default=0))],
    bases=(_Access,),
)
ServerArgs.__module__ = __name__


@dataclass(frozen=True)
class PortArgs:
    """Ports between an engine's parts. There are none: the parts are threads of one process."""

    @classmethod
    def init_new(cls, _server_args: Any) -> PortArgs:
        return cls()


def prepare_server_args(argv: Sequence[str]) -> Any:
    """The `ServerArgs` of a command line. Exits with status 2 and a line that names the flag."""
    parser = argparse.ArgumentParser(prog="tokenspeed", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    try:
        return ServerArgs.from_cli_args(parser.parse_args(list(argv)))
    except FlagError as error:
        print(f"tokenspeed: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


class _FlagAction(argparse.Action):
    """Reads a flag as the project's own parser does."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: Flag, **options: Any) -> None:
        super().__init__(option_strings, dest, **options)
        self._flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, words: Any, name: str | None = None
    ) -> None:
        given = vars(namespace).setdefault(_GIVEN, {})
        listed = [words] if isinstance(words, str) else list(words)
        try:
            take_flag(self._flag, name or self._flag.name, listed, vars(namespace), given)
        except FlagError as error:
            parser.error(str(error))


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    text = f"Refused: {flag.refusal}." if flag.refusal else flag.help
    parser.add_argument(
        *flag.spellings,
        dest=flag.dest,
        action=_FlagAction,
        flag=flag,
        nargs={"ints": "+"}.get(flag.kind) if flag.takes_value else 0,
        default=defaults(TABLE)[flag.dest],
        help=text.replace("%", "%%"),
    )
