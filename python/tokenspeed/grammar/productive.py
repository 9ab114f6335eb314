# SPDX-License-Identifier: MIT
"""Whether any text satisfies a grammar: a rule that only ever leads back to itself has none, and an output would run on
until it is cut.

Read is the normal form that xgrammar prints: `name ::= ((part part) | ...)`, where a part is a string, a class of
characters, or a rule, perhaps repeated. A part that is none of these counts as satisfiable.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]\*?|[A-Za-z_][\w.-]*(?:\{\d+(?:, *\d*)?\})?|[|()]|\S')
_RULE = re.compile(r"^([A-Za-z_][\w.-]*) ::= (.*)$", re.MULTILINE)
_REPEATED = re.compile(r"(.*)\{(\d+)(?:, *\d*)?\}")


def has_text(grammar: str) -> bool:
    """Whether the rule `root` can be brought to an end."""
    rules = {name: _alternatives(body) for name, body in _RULE.findall(grammar)}
    ending: set[str] = set()
    while True:
        more = {
            name
            for name, alternatives in rules.items()
            if name not in ending and any(all(part in ending or part not in rules for part in a) for a in alternatives)
        }
        if not more:
            return "root" not in rules or "root" in ending
        ending |= more


def _alternatives(body: str) -> list[set[str]]:
    """The rules that each alternative cannot do without."""
    alternatives: list[set[str]] = [set()]
    for token in _TOKEN.findall(body):
        if token == "|":
            alternatives.append(set())
        elif token[0].isalpha() or token[0] == "_":
            repeated = _REPEATED.fullmatch(token)
            if repeated is None:
                alternatives[-1].add(token)
            elif int(repeated[2]):
                alternatives[-1].add(repeated[1])
    return alternatives
