# SPDX-License-Identifier: MIT
"""A radix tree of prompts: which worker was given which prefix, bounded in tokens, the least recently given goes first.

Owned by `CacheAware`. An edge is a run of tokens (four bytes each); a worker that holds a node holds its ancestors
too. `_order` keeps (node, worker) pairs from the oldest use to the newest, always a node before its parent: so the
first pair is always a node below which the worker holds nothing, and evicting is taking the first pair.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence


class _Node:
    """`edge`: the tokens between the parent and here. `children`: by the first token of their edge."""

    __slots__ = ("children", "edge", "parent", "urls")

    def __init__(self, edge: array[int], parent: _Node | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.urls: set[str] = set()


class TokenTree:
    """Holds at most `max_tokens`; a token counts once for each worker that holds it."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._root = _Node(array("I"), None)
        self._order: OrderedDict[tuple[_Node, str], None] = OrderedDict()
        self._held: Counter[str] = Counter()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens held, of all workers together."""
        return self._num_tokens

    @property
    def num_remembered(self) -> int:
        """The same: what a record of prompts tells of its size."""
        return self._num_tokens

    def num_held(self, url: str) -> int:
        """Tokens that one worker holds."""
        return self._held[url]

    def match(self, tokens: Sequence[int]) -> dict[str, int]:
        """For each worker that holds some beginning of `tokens`, how many tokens of it."""
        prompt, found = array("I", tokens), dict[str, int]()
        node, at = self._root, 0
        while at < len(prompt) and (child := node.children.get(prompt[at])) is not None:
            common = _num_common(child.edge, prompt, at)
            at += common
            found.update(dict.fromkeys(child.urls, at))
            if common < len(child.edge):
                break
            node = child
        return found

    def insert(self, tokens: Sequence[int], url: str) -> None:
        """The worker was given `tokens`; if need be, what was given longest ago is forgotten."""
        prompt, node, at = array("I", tokens[: self._max_tokens]), self._root, 0
        while at < len(prompt):
            child = node.children.get(prompt[at])
            if child is None:
                child = node.children[prompt[at]] = _Node(prompt[at:], node)
            common = _num_common(child.edge, prompt, at)
            if common < len(child.edge):
                child = self._split(child, common)
            self._give(child, url)
            node, at = child, at + common
        self._touch(node, url)
        while self._num_tokens > self._max_tokens:
            self._take(*next(iter(self._order)))

    def forget(self, url: str) -> None:
        """The worker holds nothing any more."""
        for node, holder in [pair for pair in self._order if pair[1] == url]:
            self._take(node, holder)

    def _give(self, node: _Node, url: str) -> None:
        if url not in node.urls:
            node.urls.add(url)
            self._count(node, url, 1)

    def _take(self, node: _Node, url: str) -> None:
        node.urls.discard(url)
        del self._order[node, url]
        self._count(node, url, -1)
        if not node.urls and node.parent is not None:
            del node.parent.children[node.edge[0]]

    def _count(self, node: _Node, url: str, sign: int) -> None:
        self._held[url] += sign * len(node.edge)
        self._num_tokens += sign * len(node.edge)

    def _touch(self, node: _Node, url: str) -> None:
        """Mark a node and its ancestors as just used, each after those below it."""
        step: _Node | None = node
        while step is not None and step.parent is not None:
            self._order[step, url] = None
            self._order.move_to_end((step, url))
            step = step.parent

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node's edge after `at` tokens; the new upper part is returned, and counts as just used."""
        parent = node.parent
        assert parent is not None  # the root has no edge to cut
        upper = _Node(node.edge[:at], parent)
        parent.children[node.edge[0]] = upper
        node.edge, node.parent = node.edge[at:], upper
        upper.children[node.edge[0]] = node
        upper.urls = set(node.urls)
        for url in upper.urls:
            self._touch(upper, url)
        return upper


def _num_common(edge: array[int], prompt: array[int], at: int) -> int:
    """How many tokens of `edge` and of `prompt` from `at` on agree. Whole runs are compared: Python does that fast."""
    low, high = 0, min(len(edge), len(prompt) - at)
    if edge[:high] == prompt[at : at + high]:
        return high
    while high - low > 1:  # the first `low` agree, the first `high` do not
        middle = (low + high) // 2
        if edge[low:middle] == prompt[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low
