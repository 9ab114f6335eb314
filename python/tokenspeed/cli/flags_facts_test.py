# SPDX-License-Identifier: MIT
"""Every flag that operators know parses as they know it, and `--help` is grouped as their page is.

`testdata/engine_flags.tsv` and `testdata/server_parameters.tsv` were written from what operators are told, not from our
tables. Where a default or a choice of ours differs, this file says so and why.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.cli import serve
from tokenspeed.config.flags import Flag, FlagError, parse_flags
from tokenspeed.config.flags_table import ENGINE_FLAGS, SUPERVISOR_FLAGS

TABLE: tuple[Flag, ...] = (*SUPERVISOR_FLAGS, *ENGINE_FLAGS, *serve.SUPERVISED_GATEWAY_FLAGS)
BY_NAME = {name: flag for flag in reversed(TABLE) for name in flag.spellings}
SHAPES = {"switch": "none", "off": "none", "bool": "none", "append": "one", "ints": "many"}

OTHER_DEFAULTS = {
    "--host": ("0.0.0.0", "the gateway's: a server is for its network"),
    "--zmq-msgpack": ("on", "the lane has no other encoding"),
    "--device": ("auto", "the CPU is a device here"),
    "--hf-overrides": ("-", "the same as {}"),
    "--sampling-backend": ("auto", "never greedy unasked"),
    "--grammar-backend": ("xgrammar", "structured output works unasked"),
    "--grammar-compile-max-retries": ("0", "what took too long takes too long again"),
    "--reasoning-parser": ("auto", "by the template"),
    "--rl-control-host": ("127.0.0.1", "said instead of implied"),
    "--kvstore-ratio": ("-", "memory of the host is taken when it is asked for"),
    "--disable-replay-ssm": ("off", "there is nothing to replay"),
    "--disable-prefix-caching": ("off", "the facts show its target's"),
    "--disable-weight-loader-prefetch-checkpoints": ("off", "the facts show its target's"),
}
"""Ours, and why it differs from what operators know."""
ABSENT_CHOICES = {("--device", "npu"): "no kernels for it here"}


def rows(name: str) -> list[list[str]]:
    lines = (Path(__file__).parent / "testdata" / name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines[1:]]


KNOWN = rows("engine_flags.tsv")


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: str(row[0].split()[0]))
def test_a_flag_has_the_names_the_shape_and_the_default_that_operators_know(row: list[str]) -> None:
    names, takes, default, _ = row
    for name in names.split():
        flag = BY_NAME[name]
        assert SHAPES.get(flag.kind, "one") == SHAPES.get(takes, "one"), name
    expected, _ = OTHER_DEFAULTS.get(names.split()[0], (default, ""))
    assert shown(BY_NAME[names.split()[0]].default) == expected


@pytest.mark.parametrize("row", [row for row in KNOWN if row[3] != "-"], ids=lambda row: str(row[0].split()[0]))
def test_every_choice_that_operators_know_is_taken_or_refused_with_the_reason(row: list[str]) -> None:
    name = row[0].split()[0]
    flag = BY_NAME[name]
    for choice in row[3].split():
        if (name, choice) in ABSENT_CHOICES:
            with pytest.raises(FlagError, match=f"{name}: .*not one of"):
                parse_flags([name, choice], TABLE)
            continue
        try:
            assert shown(parse_flags([name, choice], TABLE).values[flag.dest]) == choice
        except FlagError as error:
            assert flag.refusal and f"{name}: refused: {flag.refusal}" in str(error)


@pytest.mark.parametrize(
    "flag", [f for f in ENGINE_FLAGS + SUPERVISOR_FLAGS if not f.takes_value], ids=lambda flag: str(flag.name)
)
def test_a_flag_without_a_value_may_be_said_in_five_ways(flag: Flag) -> None:
    plain = replace(flag, refusal="", accepts=())
    for name in flag.names:
        for words in ([name], [f"{name}=true"], [f"--no-{name[2:]}=false"]):
            assert parse_flags(words, [plain]).values[flag.dest] is (flag.kind != "off")
        for words in ([f"--no-{name[2:]}"], [f"{name}=False"]):
            assert parse_flags(words, [plain]).values[flag.dest] is (flag.kind == "off")


def help_groups() -> dict[str, list[str]]:
    """What `ts serve --help` prints: group to names."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert serve.main(["--help"]) == 0
    groups: dict[str, list[str]] = {}
    for line in out.getvalue().splitlines():
        if re.fullmatch(r"[A-Z].*:", line):
            groups[line[:-1]] = []
        elif line.startswith(("  --", "  and, above: ")):
            groups[list(groups)[-1]] += re.findall(r"(?<![\w-])--[\w.-]+", line)
    return groups


def test_help_has_the_groups_of_the_page_in_its_order_with_its_flags_in_theirs() -> None:
    groups = help_groups()
    page = {group: flags.split() for group, flags in rows("server_parameters.tsv")}
    assert list(groups)[: len(page)] == list(page)
    for group, flags in page.items():
        assert [name for name in flags if name not in groups[group]] == [], group
    first = [flags[0] for flags in page.values()]
    assert [groups[group][0] for group in list(page)[:-1]] == first[:-1]


def test_help_says_of_each_honoured_flag_once_what_it_does() -> None:
    named = [name for names in help_groups().values() for name in names]
    for flag in ENGINE_FLAGS + SUPERVISOR_FLAGS:
        assert flag.refusal or flag.name in named, flag.name
