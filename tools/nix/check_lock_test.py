# SPDX-License-Identifier: MIT
"""The lock as it is passes; each way to be wrong is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.nix.check_lock import problems

FLAKE = Path("flake.nix").read_text()
LOCK: dict[str, Any] = json.loads(Path("flake.lock").read_text())


def test_the_lock_pins_what_the_flake_asks_for() -> None:
    assert list(problems(FLAKE, LOCK)) == []


def test_another_release_in_the_flake_is_noticed() -> None:
    flake = FLAKE.replace("nixos-26.05.9592", "nixos-26.05.9593")
    assert any("asks for" in text for text in problems(flake, LOCK))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda lock: lock.update(version=6), "version"),
        (lambda lock: lock["nodes"]["root"]["inputs"].clear(), "inputs"),
        (lambda lock: lock["nodes"]["nixpkgs"]["locked"].update(rev="0" * 40), "revision"),
        (lambda lock: lock["nodes"]["nixpkgs"]["locked"].update(narHash="sha256-AAAA"), "SHA-256"),
        (lambda lock: lock["nodes"]["nixpkgs"]["locked"].update(url="https://example.org/21a67dc47014"), "locked to"),
    ],
)
def test_a_damaged_lock_is_refused(change: Callable[[dict[str, Any]], object], word: str) -> None:
    lock = copy.deepcopy(LOCK)
    change(lock)
    assert any(word in text for text in problems(FLAKE, lock))
