# SPDX-License-Identifier: MIT
"""Fill in the middle: how a model that was trained for it wants what stands before and behind a gap.

Which way that is, the vocabulary tells: families use tokens of their own. A pure description; the tokens of a prompt
are put together by `FillForm.prompt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_BEFORE, _BEHIND = "before", "behind"


@dataclass(frozen=True)
class _Family:
    """`order`: tokens by their text, and the two parts of the text. `ends`: tokens that end a middle, where the
    vocabulary has them."""

    order: tuple[str, ...]
    ends: tuple[str, ...]

    @property
    def tokens(self) -> list[str]:
        return [part for part in self.order if part not in (_BEFORE, _BEHIND)]


_FAMILIES = (
    # Qwen2.5-Coder, CodeQwen, CodeGemma
    _Family(
        ("<|fim_prefix|>", _BEFORE, "<|fim_suffix|>", _BEHIND, "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder, StarCoder2, Granite
    _Family(
        ("<fim_prefix>", _BEFORE, "<fim_suffix>", _BEHIND, "<fim_middle>"),
        ("<fim_pad>", "<file_sep>", "<repo_name>", "<|endoftext|>"),
    ),
    # SantaCoder
    _Family(("<fim-prefix>", _BEFORE, "<fim-suffix>", _BEHIND, "<fim-middle>"), ("<fim-pad>", "<|endoftext|>")),
    # DeepSeek-Coder, DeepSeek-V2 and V3
    _Family(("<｜fim▁begin｜>", _BEFORE, "<｜fim▁hole｜>", _BEHIND, "<｜fim▁end｜>"), ("<|EOT|>",)),
    # CodeLlama
    _Family(("▁<PRE>", _BEFORE, "▁<SUF>", _BEHIND, "▁<MID>"), ("▁<EOT>",)),
    # Codestral: what stands behind comes first, and the middle goes on right after what stands before
    _Family(("[SUFFIX]", _BEHIND, "[PREFIX]", _BEFORE), ()),
)


@dataclass(frozen=True)
class FillForm:
    """`order`: token ids, and None for the two parts of the text, of which the first is the one before the gap if
    `before_first`."""

    order: tuple[int | None, ...]
    before_first: bool
    ends: frozenset[int]
    """Tokens that end a middle, and tokens that have no place in one."""

    def prompt(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """The tokens to go on after, from those of the text before the gap and behind it."""
        parts = iter((before, behind) if self.before_first else (behind, before))
        ids: list[int] = []
        for token in self.order:
            ids += next(parts) if token is None else [token]
        return ids


def fill_form(token_id: Callable[[str], int | None]) -> FillForm | None:
    """The way of the model whose vocabulary `token_id` looks up; None where it was not trained to fill gaps."""
    for family in _FAMILIES:
        ids = {text: token_id(text) for text in family.tokens}
        if None in ids.values():
            continue
        ends = {token for text in (*family.tokens, *family.ends) if (token := token_id(text)) is not None}
        order = tuple(ids.get(part) for part in family.order)
        return FillForm(order, family.order.index(_BEFORE) < family.order.index(_BEHIND), frozenset(ends))
    return None
