# SPDX-License-Identifier: MIT
"""Values of parameters whose closing tag a model left out: where do they end?

At a tag that goes on with the call: the next parameter's, or the end of the call. The same tags may stand in a value
(a file about them), so each must be followed by what its format has there: a parameter that the tool has, another call,
the section's end or the answer's. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LONGEST = 512
"""Characters that are looked at."""


@dataclass(frozen=True)
class OpenValues:
    """head, opening: of a parameter; followers: what may stand behind the tags that end a call."""

    head: str
    opening: re.Pattern[str]
    followers: dict[str, tuple[str, ...]]

    @property
    def markers(self) -> list[str]:
        """The tags that may end a value."""
        return [self.head, *self.followers]

    def ends(self, marker: str, rest: str, known: Sequence[str], final: bool) -> bool | None:
        """Whether a value ends at `marker`, with `rest` behind it; None: the text that comes next will tell. known: the
        parameters of the tool, none where its schema has none."""
        if marker == self.head:
            return self._is_parameter((marker + rest)[:_LONGEST], known, final)
        left = rest[: 2 * _LONGEST].lstrip()
        if len(rest[: 2 * _LONGEST]) - len(left) > _LONGEST:
            return False
        if not left:
            return True if final else None
        if any(map(left.startswith, self.followers[marker])):
            return True
        return None if not final and any(tag.startswith(left) for tag in self.followers[marker]) else False

    def _is_parameter(self, text: str, known: Sequence[str], final: bool) -> bool | None:
        found = self.opening.match(text)
        if found is not None:
            return not known or found.group("name").strip() in known
        return False if final or len(text) == _LONGEST else None
