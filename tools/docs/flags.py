# SPDX-License-Identifier: MIT
"""Writes docs/flags.md from the tables that the commands parse: flags.py [--check].

The tables are `tokenspeed.config.flags_table` and `tokenspeed.config.gateway`; nothing about a flag is said twice.
With --check nothing is written, and a page that is not what would be written is an error. Needs no package but ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from tokenspeed.config.flags import Flag  # noqa: E402 - after the path is set
from tokenspeed.config.flags_help import arranged  # noqa: E402
from tokenspeed.config.flags_table import ENGINE_FLAGS, SERVER_FLAGS, SUPERVISOR_FLAGS  # noqa: E402
from tokenspeed.config.gateway import TABLE as GATEWAY_FLAGS  # noqa: E402

PAGE = Path("docs/flags.md")

HEAD = """\
# Flags

<!-- Written by tools/docs/flags.py from the tables that the commands parse. Change those, then run it. -->
<!-- names: off -->

Every flag is honoured or refused: a refused or unknown flag ends the command with status 2 and one line that names it,
before anything starts. A refused flag passes with a value that asks for nothing beyond what happens anyway.

A flag without a value has a `--no-` form and takes `=true` and `=false`. `--ext-yaml FILE` reads flags from YAML.
`ts serve` takes the flags of engine, supervisor and gateway and hands each to the process that owns it; `smg launch`
takes the gateway's. The keywords of `Engine(...)` are the engine's flags with underscores.
"""

SECTIONS: tuple[tuple[str, str, tuple[Flag, ...]], ...] = (
    ("Engine", "`ts serve [MODEL]`, `ts serve --headless`, `Engine(...)`", ENGINE_FLAGS),
    ("gRPC server", "`python3 -m tokenspeed.rpc.grpc [MODEL]`, beside the engine's", SERVER_FLAGS),
    ("Supervisor", "`ts serve`", SUPERVISOR_FLAGS),
    ("Gateway", "`smg launch`, `ts serve`", GATEWAY_FLAGS),
)


def cell(text: str) -> str:
    """Text that fits into one cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def show(value: Any) -> str:
    """A default or accepted value as one would write it; a dash for none."""
    if value is None or value == () or value == "":
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return f"`{' '.join(map(str, value))}`"
    return f"`{value}`"


def operand(flag: Flag) -> str:
    """What follows the flag on the command line."""
    if not flag.takes_value:
        return "no value"
    kind = {"append": "text, repeatable", "ints": "whole numbers", "str": "text", "int": "whole number"}
    return " ".join(f"`{choice}`" for choice in flag.choices) or kind.get(flag.kind, "number")


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    table = [header, ["---"] * len(header), *lines]
    return ["| " + " | ".join(cell(text) for text in line) + " |" for line in table]


def names(flag: Flag) -> str:
    return ", ".join(f"`{name}`" for name in flag.names)


def groups(title: str, honoured: list[Flag]) -> list[tuple[str, list[Flag]]]:
    """The engine's as `ts serve --help` has them; others in the order of their table."""
    if title == "Engine":
        return arranged(honoured)
    found: dict[str, list[Flag]] = {}
    for flag in honoured:
        found.setdefault(flag.group, []).append(flag)
    return list(found.items())


def section(title: str, commands: str, table: tuple[Flag, ...]) -> list[str]:
    """The honoured flags by group, then the refused ones with their reasons."""
    honoured = [flag for flag in table if not flag.refusal]
    refused = sorted((flag for flag in table if flag.refusal), key=lambda flag: flag.name)
    lines = [f"## {title}", "", f"{commands}: {len(honoured)} flags honoured, {len(refused)} refused.", ""]
    for group, members in groups(title, honoured):
        body = [(names(f), operand(f), show(f.default), f.help) for f in members]
        lines += [f"### {title}: {group}", "", *rows(("flag", "takes", "default", "what it does"), body), ""]
    if refused:
        reasons = [(names(f), show(tuple(f.accepts)), f.refusal) for f in refused]
        lines += [f"### {title}: refused", "", *rows(("flag", "values that pass", "why it is refused"), reasons), ""]
    return lines


def page() -> str:
    lines = [HEAD]
    for title, commands, table in SECTIONS:
        lines += section(title, commands, table)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    check = parser.parse_args().check
    target = ROOT / PAGE
    if not check:
        target.write_text(page(), encoding="utf-8")
        return 0
    if not target.is_file() or target.read_text(encoding="utf-8") != page():
        print(f"{PAGE} is out of date: run tools/docs/flags.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
