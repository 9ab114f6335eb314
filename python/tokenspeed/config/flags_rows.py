# SPDX-License-Identifier: MIT
"""How the tables of flags are written: a call a row, its names in one string, that of the documentation first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenspeed.config.flags import Flag, Kind


def flag(
    names: str, kind: Kind, default: Any, group: str, help: str, choices: tuple[Any, ...] = (), target: str = ""
) -> Flag:
    """A flag that is honoured."""
    return Flag(tuple(names.split()), kind, default, help, group, choices=choices, target=target)


def refused_flag(names: str, kind: Kind, default: Any, why: str, *accepts: Any) -> Flag:
    """accepts: values, beside the default, that ask for nothing beyond what happens anyway."""
    known = (default, *accepts) if default is not None else accepts
    return Flag(tuple(names.split()), kind, default, "", "Refused", accepts=known, refusal=why)


@dataclass(frozen=True)
class Rows:
    """Writes the honoured flags of one group."""

    group: str

    def __call__(self, names: str, kind: Kind, default: Any, help: str, choices: tuple[Any, ...] = ()) -> Flag:
        return flag(names, kind, default, self.group, help, choices)
