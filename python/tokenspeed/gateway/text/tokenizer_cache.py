# SPDX-License-Identifier: MIT
"""Tokens of texts that were encoded before: of whole texts, and of pieces of them. The same tokens with and without.

A prompt is cut behind special tokens, which a tokenizer finds in the text before it does anything else, so that
nothing merges across them: the tokens of a prompt are those of its pieces. A turn of a conversation then costs the
encoding of what is new. Not every tokenizer is so (a space before the first word of a text, tokens that swallow the
white space behind them): a token is cut behind only if it has no such option, and only after trying that what stands
behind it encodes alone as it does there. Used from several threads; bounded by bytes, the longest unused go first.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.gateway.text.tokenizer import Tokenizer

Lookup = Callable[[str, bool, int], None]
"""(cache: "l0" or "l1", whether it was there, bytes of text that were not encoded)."""

_ENTRY_BYTES = 200
"""What a dictionary needs for an entry beside the text and the tokens, about."""
_LONGEST_SHARE = 4
"""A text that would take more than this part of a cache is not kept: it would push out everything else."""
_TRIALS = ("a", " a", "  a", "\n", "\n\na", "1", ".", "'s", "안", "🙂", "a b")


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of memory; 0 is off."""

    exact_entries: int
    exact_bytes: int
    piece_bytes: int


class TokenizerCache:
    """`encode` as `Tokenizer.encode`; `on_lookup` is told of every look."""

    def __init__(self, tokenizer: Tokenizer, sizes: CacheSizes, on_lookup: Lookup) -> None:
        self._tokenizer, self._on_lookup = tokenizer, on_lookup
        self._exact = _Lru(sizes.exact_entries, sizes.exact_bytes) if sizes.exact_bytes else None
        self._pieces = _Lru(sys.maxsize, sizes.piece_bytes) if sizes.piece_bytes else None
        tokens = {token.text: token for token in tokenizer.special_tokens}
        # The longest of those that begin at a place is the one that a tokenizer finds there.
        found = sorted(map(re.escape, tokens), key=len, reverse=True)
        self._special = re.compile("|".join(found)) if found else None
        self._cuttable = {text: None if token.isolated else False for text, token in tokens.items()}
        """Whether a text may be cut behind a token; None: not tried yet."""
        self._dependent = tuple(text for text, token in tokens.items() if not token.isolated)
        """Tokens that are found, or not, by what stands around them: nothing is cut right before one."""

    @property
    def num_evicted(self) -> dict[str, int]:
        """Entries that made room for others, by cache ("l0" or "l1")."""
        caches = {"l0": self._exact, "l1": self._pieces}
        return {name: cache.num_evicted for name, cache in caches.items() if cache is not None}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`."""
        if self._exact is None:
            return self._encode(text, add_special_tokens)
        known = self._exact.get((text, add_special_tokens))
        self._on_lookup("l0", known is not None, _num_bytes(text) if known is not None else 0)
        if known is not None:
            return known.tolist()
        ids = self._encode(text, add_special_tokens)
        self._exact.put((text, add_special_tokens), ids)
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._pieces is None or self._special is None or add_special_tokens:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        begin = 0
        for end in self._cuts(text):
            ids += self._piece(text[begin:end])
            begin = end
        return ids

    def _cuts(self, text: str) -> list[int]:
        assert self._special is not None
        ends = [match.end() for match in self._special.finditer(text) if self._may_cut(match[0])]
        cuts = [end for end in ends if not text.startswith(self._dependent, end)]
        if not cuts or cuts[-1] < len(text):
            cuts.append(len(text))
        return cuts

    def _piece(self, piece: str) -> list[int]:
        assert self._pieces is not None
        known = self._pieces.get((piece, False))
        self._on_lookup("l1", known is not None, _num_bytes(piece) if known is not None else 0)
        if known is not None:
            return known.tolist()
        ids = self._tokenizer.encode(piece, add_special_tokens=False)
        self._pieces.put((piece, False), ids)
        return ids

    def _may_cut(self, token: str) -> bool:
        may = self._cuttable[token]
        if may is None:
            may = self._cuttable[token] = all(self._splits(token + trial, len(token)) for trial in _TRIALS)
        return may

    def _splits(self, text: str, cut: int) -> bool:
        whole, left, right = (
            self._tokenizer.encode(part, add_special_tokens=False) for part in (text, text[:cut], text[cut:])
        )
        return whole == left + right


class _Lru:
    """Tokens by text, in at most `max_bytes` of memory, about."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.num_evicted = 0
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, bool]) -> array[int] | None:
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
            return known

    def put(self, key: tuple[str, bool], ids: list[int]) -> None:
        kept = array("I", ids)
        num_bytes = _size(key, kept)
        if num_bytes > self._max_bytes // _LONGEST_SHARE:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = kept
            self._num_bytes += num_bytes
            while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._entries.popitem(last=False))
                self.num_evicted += 1


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _size(key: tuple[str, bool], ids: array[int]) -> int:
    return sys.getsizeof(key[0]) + len(ids) * ids.itemsize + _ENTRY_BYTES
