# SPDX-License-Identifier: MIT
"""Live names pass, dead ones are found, and what is no name is left alone."""

from __future__ import annotations

import pytest

from tools.lint.dead_names import Tree, dead, dead_links, spans

PYTHON = """
import torch
LIMIT_S = 3.0
class Base:
    def close(self) -> None: ...
class EngineLoop(Base):
    depth: int = 1
    def __init__(self) -> None:
        self.in_flight = None
    def step(self) -> None: ...  # retired_name lives in this comment only
def read_gguf(path): return environ["TOKENSPEED_DEBUG"], OPS["gemm.linear"]
"""
CPP = "// OldPool is gone\nclass BlockPool { BlockRef Take(); };\n"


@pytest.fixture
def tree() -> Tree:
    tree = Tree()
    tree.add("python/tokenspeed/engine/loop.py", PYTHON)
    tree.add("cc/cache/block_pool.h", CPP)
    tree.add("cc/cache/BUILD.bazel", 'cc_library(name = "block_pool")')
    tree.add("docs/flags.md", "")
    return tree


@pytest.mark.parametrize(
    "span",
    [
        "python/tokenspeed/engine/loop.py",
        "engine/loop.py",
        "loop.py",
        "cc/cache/",
        "cc/*/block_pool.h",
        "engine/*.py",
        "lo*.py",
        "gemm.linear",
        "//cc/cache:block_pool",
        "//cc/...",
        "EngineLoop",
        "EngineLoop.step",
        "EngineLoop.step()",
        "EngineLoop.in_flight",
        "EngineLoop.close",
        "loop.read_gguf",
        "tokenspeed.engine.loop.EngineLoop",
        "read_gguf()",
        "BlockPool::Take",
        "LIMIT_S",
        "TOKENSPEED_DEBUG",
        "torch.distributed",
        "ValueError",
    ],
)
def test_a_live_name_passes(tree: Tree, span: str) -> None:
    assert dead(span, tree) is None


@pytest.mark.parametrize(
    "span",
    [
        "python/tokenspeed/engine/gone.py",
        "gone.py",
        "cc/gone/",
        "cc/*/gone.h",
        "gone_*.py",
        "gemm.gone",
        "//cc/cache:gone",
        "//cc/gone",
        "EngineLoop.gone",
        "EngineGone",
        "retired_name",
        "OldPool",
        "loop.gone()",
        "gone()",
        "BlockPool::Gone",
        "TOKENSPEED_GONE",
    ],
)
def test_a_dead_name_is_found(tree: Tree, span: str) -> None:
    assert dead(span, tree) is not None


@pytest.mark.parametrize(
    "span",
    [
        "--max-model-len",
        "/v1/models",
        "ts serve MODEL",
        "temperature",
        "n",
        '{"a": 1}',
        "0.5",
        "GET /health",
        "SIGTERM",
    ],
)
def test_what_is_no_name_is_left_alone(tree: Tree, span: str) -> None:
    assert dead(span, tree) is None


def test_only_inline_code_outside_fences_and_switched_off_text_is_read() -> None:
    text = "a `one` b `two`\n```\n`three`\n```\n<!-- names: off -->\n`four`\n<!-- names: on -->\n`five`\n"
    assert list(spans(text)) == [(1, "one"), (1, "two"), (8, "five")]


def test_links_lead_to_files_of_the_tree_or_out_of_it(tree: Tree) -> None:
    good = "[a](flags.md) [b](flags.md#engine) [c](../cc/cache/block_pool.h) [d](https://example.org/x) [e](#here)"
    assert not list(dead_links("docs/page.md", good, tree))
    assert list(dead_links("docs/page.md", "text\n[a](gone.md)", tree)) == [(2, "gone.md")]
    assert list(dead_links("README.md", "[a](flags.md) [b](docs/flags.md)", tree)) == [(1, "flags.md")]
