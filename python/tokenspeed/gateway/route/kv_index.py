# SPDX-License-Identifier: MIT
"""What an engine's prefix cache holds, by the events that it publishes: a pure machine, one a rank.

Hashes of blocks are the engine's own and mean nothing here, so a prompt is followed block by block from the root: by
the hash of the block before and the tokens of the next. A block counts while any tier holds it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass
class _Block:
    key: tuple[Hashable, bytes]
    media: set[str | None] = field(default_factory=set)


class KvIndex:
    """One rank's blocks. Unknown hashes are normal: the engine's buffer may not reach back to its start."""

    def __init__(self, counts: Counter[str] | None = None) -> None:
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._children: dict[tuple[Hashable, bytes], Hashable] = {}
        self._blocks: dict[Hashable, _Block] = {}
        self._block_size = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that are held."""
        return len(self._blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens of those blocks."""
        return len(self._blocks) * self._block_size

    def store(self, block_hash: Hashable, parent: Hashable, tokens: Sequence[int], medium: str | None) -> None:
        """A full block can be reused; `parent` None begins a prompt."""
        self._block_size = len(tokens)
        block = self._blocks.get(block_hash)
        self._counts["blocks"] += 1
        if block is None:
            if parent is not None and parent not in self._blocks:
                self._counts["parentless_blocks"] += 1
            block = self._blocks[block_hash] = _Block((parent, array("I", tokens).tobytes()))
            self._children[block.key] = block_hash
        block.media.add(medium)

    def remove(self, block_hash: Hashable, medium: str | None) -> None:
        """A tier holds the block no more."""
        block = self._blocks.get(block_hash)
        self._counts["blocks"] += 1
        if block is None:
            return
        block.media.discard(medium)
        if not block.media:
            del self._blocks[block_hash]
            # Blocks of the same tokens with another identity (a salt, an image) have the same key.
            if self._children.get(block.key) == block_hash:
                del self._children[block.key]

    def clear(self) -> None:
        """The cache is empty, or no longer known."""
        self._children.clear()
        self._blocks.clear()

    def match(self, tokens: array[int]) -> int:
        """How many of the first `tokens` are held."""
        size = self._block_size
        if not self._blocks or not size:
            return 0
        parent: Hashable = None
        for at in range(0, len(tokens) - size + 1, size):
            found = self._children.get((parent, tokens[at : at + size].tobytes()))
            if found is None:
                return at
            parent = found
        return len(tokens) - len(tokens) % size


class WorkerBlocks:
    """The indexes of a worker's ranks. It is `followed` while its engine is subscribed to, and `known` once some rank
    has told something. `refuses`: the engine was asked and publishes nothing."""

    def __init__(self) -> None:
        self._ranks: dict[int, KvIndex] = {}
        self.followed = False
        self.known = False
        self.refuses = False
        self.counts: Counter[str] = Counter()
        """What became of KV events since somebody looked: names of `observability.worker_metrics.KV_EVENTS`."""

    def of_rank(self, rank: int) -> KvIndex:
        """The index of a rank, made when first asked for."""
        return self._ranks.setdefault(rank, KvIndex(self.counts))

    def was_told(self) -> None:
        """Some rank has told something."""
        self.known = True

    def take_counts(self) -> dict[str, int]:
        """`counts`, which begin anew."""
        counts = dict(self.counts)
        self.counts.clear()
        return counts

    def was_refused(self) -> None:
        """The engine publishes nothing."""
        self.followed, self.refuses = False, True

    def forget(self) -> None:
        """The engine is gone."""
        self._ranks.clear()
        self.followed = self.known = self.refuses = False

    @property
    def num_blocks(self) -> int:
        """Blocks of all ranks."""
        return sum(index.num_blocks for index in self._ranks.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks' blocks."""
        return sum(index.num_tokens for index in self._ranks.values())

    def match(self, tokens: array[int]) -> int:
        """How many of the first `tokens` some rank holds."""
        return max((index.match(tokens) for index in self._ranks.values()), default=0)
